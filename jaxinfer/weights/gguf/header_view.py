"""Model description from a GGUF file: metadata with checked types and bounds."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxinfer.weights.errors import CheckpointError, quoted

MAX_HEADS = 1 << 14
MAX_EXPERTS = 1 << 12


@dataclasses.dataclass(frozen=True)
class Described:
    """Metadata and tensor shapes of a GGUF file.

    Attributes:
        path: path of the file, for messages.
        metadata: key-value pairs of the file.
        shapes: shapes of its tensors, by ggml's names, as [out, in].
        read: returns a one-dimensional unquantized tensor by name.
    """

    path: pathlib.Path
    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def get(self, key: str) -> Any:
        """Return the value of a key below the architecture's name, such as "block_count"; None if it is absent."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        """Return an integer; a per-layer list must have equal entries."""
        value = self.get(key)
        if isinstance(value, list) and len(set(map(str, value))) == 1:
            value = value[0]
        if value is None:
            value = default
        if type(value) is not int or not 0 <= value <= most:
            raise self.bad(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return the number that config.json had: the shortest decimal that rounds to the stored float32."""
        value = self.get(key)
        if value is None:
            value = default
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.bad(key, value)
        return float(str(np.float32(value)))

    def text(self, key: str) -> str:
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.path} does not say what it is: its metadata lacks {key}")
        return value

    def bad(self, key: str, value: object) -> CheckpointError:
        name = f"{self.architecture}.{key}"
        if value is None:
            return CheckpointError(f"{self.path} lacks the metadata {name}, which its model cannot do without")
        found = "a list" if isinstance(value, list) else quoted(str(value))
        return CheckpointError(f"{self.path} has {found} as {name}, which is not supported")

    def has(self, tensor: str) -> bool:
        return tensor in self.shapes

    def rows(self, tensor: str) -> int:
        """Return the number of outputs of a matrix."""
        shape = self.shapes.get(tensor, ())
        if len(shape) != 2:
            raise CheckpointError(f"{self.path} has no matrix {tensor}")
        return shape[0]

    @property
    def layers(self) -> int:
        """Number of layers without multi-token prediction layers, bounded by the number of tensors, as each layer has
        at least one."""
        blocks = self.count("block_count", most=len(self.shapes))
        return blocks - self.count("nextn_predict_layers", 0, most=blocks)

    @property
    def heads(self) -> int:
        return max(1, self.count("attention.head_count", most=MAX_HEADS))

    @property
    def kv_heads(self) -> int:
        return max(1, self.count("attention.head_count_kv", self.heads, most=MAX_HEADS))

    @property
    def experts(self) -> int:
        return self.count("expert_count", 0, most=MAX_EXPERTS)
