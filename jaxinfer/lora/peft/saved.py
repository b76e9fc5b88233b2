"""Whole modules in an adapter's file: ``modules_to_save``, and modules that ``save_embedding_layers`` adds.

A copy of the model's own module changes nothing. In a trained embedding table or head, the rows that differ become a
low-rank product with one rank per token, as for ``trainable_token_indices``. PEFT replaces only the named module for
``modules_to_save``, and loads any other tensor into the model's own parameter, which with tied embeddings changes both
table and head.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float32

from jaxinfer.lora.errors import AdapterError
from jaxinfer.lora.peft.adapter_tensors import BIAS, OF_LORA, WEIGHT, Unit
from jaxinfer.lora.peft.config import ends_with
from jaxinfer.lora.peft.module_paths import Path, Place
from jaxinfer.lora.peft.tokens import RowReader, unit_of_rows
from jaxinfer.types import EMBEDDING, HEAD
from jaxinfer.weights.errors import quoted
from jaxinfer.weights.safetensors.reader import DTYPES, TensorInfo
from jaxinfer.weights.tree import as_placed

_log = logging.getLogger("jaxinfer")

_KEY = "modules_to_save"
_MERGE = "merge the adapter into the model (PEFT's merge_and_unload, then save_pretrained) and serve that"


class SavedReader(RowReader):
    """Reads units for the rows in which saved tables differ from those of the model."""

    def units(self) -> Iterator[Unit]:
        """Yield all units of saved modules.

        Raises:
            AdapterError: a module is not in the file, or differs from the model's and cannot be served as an adapter.
        """
        whole = {name: tensors[WEIGHT] for name, tensors in self.files.modules.items() if WEIGHT in tensors}
        for name, info in whole.items():
            values = self.files.read(info)
            if self._is_own(name, info, values):
                _log.info(f"tensor {quoted(info.name)} of {self.files.folder} is a copy of the model's own")
                continue
            place = self._table(name, info)
            rows, change = self._change(place, info, values)
            for path in self._changed(name, place.path, {self._path(other) for other in whole}):
                yield unit_of_rows(self.places.of_paths[path], rows, change)
        self._require_named()

    def _require_named(self) -> None:
        """Check that the file has each of ``modules_to_save``."""
        whole = [name for name, tensors in self.files.modules.items() if {WEIGHT, BIAS} & tensors.keys()]
        for key in self.config.modules_to_save:
            if not any(ends_with(self.files.naming.theirs(name), key) for name in whole):
                raise AdapterError(f"{self.files.folder} lacks tensors of {_KEY}: {quoted(key)}")

    def _is_own(self, name: str, info: TensorInfo, values: np.ndarray) -> bool:
        for path, source in self.places.sources.get(f"{name}.{WEIGHT}", ()):
            if source.shape == info.shape:
                own = np.asarray(self.base(path, _KEY), np.float32)[(*source.where, ...)]
                if is_cast(as_placed(values, source), own, info):
                    return True
        return False

    def _path(self, name: str) -> Path | None:
        places = self.places.modules.get(name, ())
        return places[0].path if len(places) == 1 else None

    def _table(self, name: str, info: TensorInfo) -> Place:
        """Return the embedding table or head that a tensor replaces."""
        if self._path(name) not in (EMBEDDING, HEAD):
            raise self._error(info, "and of saved modules only a table of embeddings or a head may")
        if self.files.modules[name].keys() & OF_LORA:
            raise self._error(info, "and it has LoRA besides")
        (place,) = self.places.modules[name]
        if info.shape != place.source.shape:
            raise self._error(info, f"it is {list(info.shape)}, not {list(place.source.shape)}")
        return place

    def _change(
        self, place: Place, info: TensorInfo, values: Float32[np.ndarray, "tokens size"]
    ) -> tuple[tuple[int, ...], Float32[np.ndarray, "rows size"]]:
        """Return the tokens whose rows differ, and their difference from the model's rows."""
        own = np.asarray(self.base(place.path, _KEY), np.float32)
        rows = min((np.flatnonzero(~same.all(axis=1)) for same in _equal(values, own, info)), key=len)
        if len(rows) > self.max_rank:
            raise self._error(info, f"{len(rows)} rows, a rank each, more than the {self.max_rank} of max_lora_rank")
        return tuple(rows.tolist()), values[rows] - own[rows]

    def _changed(self, name: str, path: Path, saved: set[Path | None]) -> list[Path]:
        """Return the parameters that are replaced."""
        theirs = self.files.naming.theirs(name)
        named = any(ends_with(theirs, key) for key in self.config.modules_to_save)
        if named or not self.places.tied or {EMBEDDING, HEAD} <= saved:
            return [path]
        return [EMBEDDING, HEAD]

    def _error(self, info: TensorInfo, why: str) -> AdapterError:
        said = f"{_KEY}: tensor {quoted(info.name)} of {self.files.folder} differs from the model's own"
        return AdapterError(f"{said}: {why}; {_MERGE}")


def is_cast(values: np.ndarray, own: np.ndarray, info: TensorInfo) -> bool:
    """Return whether two tensors are equal up to a cast of one of them to a checkpoint dtype."""
    return any(bool(equal.all()) for equal in _equal(values, own, info))


def _equal(values: np.ndarray, own: np.ndarray, info: TensorInfo) -> Iterator[np.ndarray]:
    """Yield which values are equal, for each possible cast."""
    with np.errstate(over="ignore"):
        yield values == own.astype(DTYPES[info.dtype])
        for kind in (DTYPES["BF16"], DTYPES["F16"]):
            yield values.astype(kind) == own
