"""Checkpoint tensors that a GGUF file splits: MLA up-projections, gate and up of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxinfer.quant.ggml import KINDS
from jaxinfer.weights.errors import CheckpointError, quoted
from jaxinfer.weights.gguf.blocks import layout_of, part_of
from jaxinfer.weights.gguf.tensors import Plain, stored_part
from jaxinfer.weights.quantized import StoredWeight
from jaxinfer.weights.safetensors.reader import TensorInfo


class Latest:
    """Cache of the last array: parameters take the experts of a stack one by one, each time by the stack's name."""

    def __init__(self) -> None:
        self._name, self._array = "", np.empty(0)

    def get(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        if name != self._name:
            self._name, self._array = "", np.empty(0)  # free the old array before making the new one
            self._array = make()
            self._name = name
        return self._array


class _Made:
    """Base of tensors assembled in memory from several tensors of a file."""

    parts: tuple[Plain, ...]

    @property
    def _nbytes(self) -> int:
        return sum(part.source.nbytes for part in self.parts)

    def expect(self, part: np.ndarray) -> None:
        del part  # already in memory

    def release(self) -> None:
        for part in self.parts:
            part.release()


@dataclasses.dataclass(frozen=True)
class Joined(_Made):
    """A stack [experts, in, out], or biases [experts, out], joined from parts [experts, out, in] or [experts, out].

    Attributes:
        interleaved: outputs of the parts alternate; otherwise the parts are concatenated.
    """

    name: str
    parts: tuple[Plain, ...]
    interleaved: bool
    latest: Latest

    @property
    def fits(self) -> bool:
        return len({part.shape for part in self.parts}) == 1 and len(self.parts[0].shape) in (2, 3)

    @property
    def in_blocks(self) -> bool:
        """Whether the result can stay in blocks: all parts have one block type and are stacks of matrices."""
        kinds = {part.source.kind for part in self.parts}
        return len(kinds) == 1 and kinds <= KINDS.keys() and len(self.parts[0].shape) == 3

    @property
    def _upright(self) -> tuple[int, ...]:
        """Shape with outputs before inputs."""
        experts, out, *inputs = self.parts[0].shape
        return (experts, len(self.parts) * out, *inputs)

    def info(self, name: str) -> TensorInfo:
        experts, *rest = self._upright
        shape = (experts, *reversed(rest))
        kinds = {part.info(part.name).dtype for part in self.parts}
        kind = kinds.pop() if len(kinds) == 1 else "F32"
        return TensorInfo(name, kind, shape, self.parts[0].source.start, self._nbytes)

    def read(self) -> np.ndarray:
        return self.latest.get(self.name, self._numbers)

    def stored(self) -> StoredWeight:
        """Return the stack as a block-quantised weight."""
        layout = layout_of(self.parts[0].source.kind)

        def read(part: str) -> np.ndarray:
            array = self.latest.get(f"{self.name}#{part}", lambda: self._stored_part(part))
            self.release()
            return array

        return StoredWeight(self._upright, layout, read, self._nbytes)

    def _numbers(self) -> np.ndarray:
        joined = self._join([part.read() for part in self.parts])
        return joined.swapaxes(1, 2) if joined.ndim == 3 else joined

    def _stored_part(self, part: str) -> np.ndarray:
        return self._join([_part_of_stack(each, part) for each in self.parts])

    def _join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        if len(arrays) == 1:
            return arrays[0]
        if not self.interleaved:
            return np.concatenate(arrays, axis=1)
        stacked = np.stack(arrays, axis=2)
        return stacked.reshape(stacked.shape[0], -1, *stacked.shape[3:])


@dataclasses.dataclass(frozen=True)
class Rows(_Made):
    """A matrix [out, in] whose rows are in several tensors, in another order.

    Attributes:
        order: given the number of rows, returns the index of each row among the concatenated rows of the parts.
    """

    parts: tuple[Plain, ...]
    order: Callable[[int], np.ndarray]

    @property
    def fits(self) -> bool:
        shapes = [part.shape for part in self.parts]
        return {len(shape) for shape in shapes} == {2} and len({shape[1] for shape in shapes}) == 1

    @property
    def in_blocks(self) -> bool:
        """Whether the result can stay in blocks: all parts have one block type."""
        kinds = {part.source.kind for part in self.parts}
        return len(kinds) == 1 and kinds <= KINDS.keys()

    @property
    def _shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def info(self, name: str) -> TensorInfo:
        kinds = {part.info(part.name).dtype for part in self.parts}
        kind = kinds.pop() if len(kinds) == 1 else "F32"
        return TensorInfo(name, kind, self._shape, self.parts[0].source.start, self._nbytes)

    def read(self) -> np.ndarray:
        return self._joined([part.read() for part in self.parts])

    def stored(self) -> StoredWeight:
        def read(part: str) -> np.ndarray:
            array = self._joined([stored_part(each, part) for each in self.parts])
            self.release()
            return array

        return StoredWeight(self._shape, layout_of(self.parts[0].source.kind), read, self._nbytes)

    def _joined(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(arrays)[self.order(self._shape[0])]


def _part_of_stack(plain: Plain, part: str) -> np.ndarray:
    """Return an array of the layout of a stack's blocks: [experts, out, ...]."""
    blocks = plain.stored()
    try:
        array = part_of(plain.source.kind, part, blocks.reshape(-1, *blocks.shape[-2:]))
    except CheckpointError as error:
        raise CheckpointError(f"tensor {quoted(plain.name)} of {plain.file.path} has {error}") from None
    return array.reshape(*plain.shape[:2], *array.shape[1:])


@dataclasses.dataclass(frozen=True)
class LatentUp:
    """``kv_b_proj`` [heads * (nope + value), rank], joined from [heads, rank, nope] and [heads, value, rank]."""

    keys: Plain
    values: Plain

    @property
    def fits(self) -> bool:
        keys, values = self.keys.shape, self.values.shape
        return len(keys) == len(values) == 3 and keys[0] == values[0] and keys[1] == values[2]

    def info(self, name: str) -> TensorInfo:
        (heads, rank, nope), value = self.keys.shape, self.values.shape[1]
        nbytes = self.keys.source.nbytes + self.values.source.nbytes
        return TensorInfo(name, "F32", (heads * (nope + value), rank), self.keys.source.start, nbytes)

    def read(self) -> np.ndarray:
        keys, values = (part.read().astype(np.float32) for part in (self.keys, self.values))
        joined = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
        return joined.reshape(-1, joined.shape[-1])

    def expect(self, part: np.ndarray) -> None:
        del part  # already in memory

    def release(self) -> None:
        self.keys.release()
        self.values.release()
