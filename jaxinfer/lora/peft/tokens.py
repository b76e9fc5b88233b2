"""Rows of an embedding table or head that an adapter has trained (``trainable_token_indices``).

The file has the new rows in the order of their token ids in the configuration. The change is a low-rank product with
one rank per token. With tied embeddings the head gets the new rows, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Float32

from jaxinfer.lora.errors import AdapterError
from jaxinfer.lora.peft.adapter_tensors import OF_LORA, Unit
from jaxinfer.lora.peft.config import PeftConfig, ends_with
from jaxinfer.lora.peft.module_paths import Path, Place, Places
from jaxinfer.lora.peft.tensors import AdapterFiles
from jaxinfer.types import HEAD
from jaxinfer.weights.errors import quoted
from jaxinfer.weights.safetensors.reader import TensorInfo

TOKENS = "token_adapter.trainable_tokens_delta"
_KEY = "trainable_token_indices"


@dataclasses.dataclass(frozen=True)
class RowReader:
    """Base of readers of rows.

    Attributes:
        max_rank: the largest supported rank.
        base: returns the model's own parameter at a path; the string is the reason for an error message.
    """

    files: AdapterFiles
    config: PeftConfig
    places: Places
    max_rank: int
    base: Callable[[Path, str], np.ndarray]


class TokenReader(RowReader):
    """Reads units of rows that the file lists by token."""

    def units(self) -> Iterator[Unit]:
        """Yield all units of rows of the adapter.

        Raises:
            AdapterError: the file and the configuration have different rows, or the model has no such table.
        """
        found = {name: tensors[TOKENS] for name, tensors in self.files.modules.items() if TOKENS in tensors}
        if both := [name for name in found if self.files.modules[name].keys() & OF_LORA]:
            raise AdapterError(f"adapter_config.json: {_KEY} cannot stand beside LoRA of {quoted(both[0])}")
        for key in self.config.trainable_token_indices:
            if not any(self._is_named(name, key) for name in found):
                raise AdapterError(f"{self.files.folder} lacks the rows of {_KEY} {quoted(key)}")
        for name, info in found.items():
            place, rows = self._place(name, info), self._indices(name, info)
            self._require_room(place, rows, info)
            change = self.files.read(info) - self.base(place.path, _KEY)[[*rows]]
            yield unit_of_rows(place, rows, change)
            if self.places.tied and place.of_rows and not any(self._place(*one).path == HEAD for one in found.items()):
                yield unit_of_rows(self.places.of_paths[HEAD], rows, change)

    def _is_named(self, name: str, key: str) -> bool:
        if not key:
            return self._of_rows(name)
        return ends_with(self.files.naming.theirs(name), key)

    def _of_rows(self, name: str) -> bool:
        return any(place.of_rows for place in self.places.modules.get(name, ()))

    def _place(self, name: str, info: TensorInfo) -> Place:
        places = self.places.modules.get(name, ())
        if len(places) != 1 or not (places[0].of_rows or places[0].path == HEAD):
            raise AdapterError(f"tensor {quoted(info.name)}: the model has no such table of tokens")
        return places[0]

    def _indices(self, name: str, info: TensorInfo) -> tuple[int, ...]:
        for key, rows in self.config.trainable_token_indices.items():
            if self._is_named(name, key):
                return rows
        raise AdapterError(f"tensor {quoted(info.name)} has rows of which {_KEY} says nothing")

    def _require_room(self, place: Place, rows: tuple[int, ...], info: TensorInfo) -> None:
        tokens, size = place.sizes if place.of_rows else place.sizes[::-1]
        if info.shape != (len(rows), size):
            raise AdapterError(f"tensor {quoted(info.name)} is {list(info.shape)}, not {[len(rows), size]}")
        if max(rows) >= tokens:
            raise AdapterError(f"adapter_config.json: {_KEY} has {max(rows)}, and the model has {tokens} tokens")
        if len(rows) > self.max_rank:
            raise AdapterError(
                f"adapter_config.json: {_KEY} has {len(rows)} tokens, a rank each, more than the {self.max_rank} of "
                f"max_lora_rank"
            )


def unit_of_rows(place: Place, rows: tuple[int, ...], change: Float32[np.ndarray, "rows size"]) -> Unit:
    """Return a unit that adds ``change`` to rows: outputs of an embedding table, inputs of a head."""
    tokens = place.sizes[0] if place.of_rows else place.sizes[1]
    chosen = np.zeros((len(rows), tokens), np.float32)
    chosen[np.arange(len(rows)), [*rows]] = 1.0
    a, b = (chosen, change) if place.of_rows else (change, chosen)
    return Unit((place,), a, np.ascontiguousarray(b.T))
