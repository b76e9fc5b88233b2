"""Reader of PEFT folders: builds adapters in the shapes of a model's parameters."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float32

from jaxinfer.lora.adapter import Adapter, Delta
from jaxinfer.lora.errors import AdapterError
from jaxinfer.lora.peft.adapter_tensors import BASE_BIAS, BASE_WEIGHT, BIAS, WEIGHT, Unit, UnitReader
from jaxinfer.lora.peft.config import PeftConfig, parse_config
from jaxinfer.lora.peft.module_paths import Path, Place, Places, find_places, input_axis, room_for, values_at
from jaxinfer.lora.peft.saved import SavedReader, is_cast
from jaxinfer.lora.peft.tensors import AdapterFiles, open_adapter
from jaxinfer.lora.peft.tokens import TokenReader
from jaxinfer.types import ParamSpec, ParamTree
from jaxinfer.weights.errors import quoted
from jaxinfer.weights.safetensors.reader import TensorInfo

Base = Callable[[Path], np.ndarray]
COPY_TOLERANCE = 2.0**-7
"""Tolerance for copies of the base's embeddings, relative to the largest value: the base may be bfloat16."""


def read_adapter(
    folder: pathlib.Path, specs: ParamTree, *, max_rank: int, base: Base | None = None, tower: bool = False
) -> Adapter:
    """Read a PEFT folder.

    Args:
        specs: specs of the model, as its family declares them (`Model.family.param_specs`).
        max_rank: the largest rank of a module.
        base: returns the model's own parameter at a path, dequantized, in its shape and in float32. Called for weights
            that DoRA scales, for biases that replace the model's, and for modules that PEFT saved with an adapter.
        tower: the model takes images: an adapter that changes the vision tower is rejected, not read without that.

    Raises:
        AdapterError: the folder is damaged, unsupported, or does not fit the model. Every tensor must be used, and
            every name in its configuration must match, or the message names it.
    """
    files = open_adapter(folder)
    config = parse_config(files.config)
    places = find_places(specs)
    files = files.named({*places.modules, *places.experts, *places.biases}, tower=tower)
    reader = _Deltas(files, config, places, places.specs, base)
    units = UnitReader(files, config, places, max_rank).units()
    for rows in (TokenReader, SavedReader):
        units += rows(files, config, places, max_rank, reader.base_of).units()
    deltas = reader.deltas(units)
    return Adapter(identity(files, config), max(unit.rank for unit in units), deltas)


def identity(files: AdapterFiles, config: PeftConfig) -> str:
    """Return the SHA-256 of all that affects results: canonical configuration and tensors, not the adapter's name."""
    state = hashlib.sha256(json.dumps(config.canonical).encode())
    for name, info in sorted(files.tensors.items()):
        state.update(json.dumps([name, info.dtype, info.shape]).encode())
        state.update(np.ascontiguousarray(files.raw(name)).reshape(-1).view(np.uint8).data)
    return state.hexdigest()


@dataclasses.dataclass(frozen=True)
class _Deltas:
    files: AdapterFiles
    config: PeftConfig
    places: Places
    specs: Mapping[Path, ParamSpec]
    base: Base | None

    def deltas(self, units: Sequence[Unit]) -> dict[Path, Delta]:
        by_path: dict[Path, list[Unit]] = collections.defaultdict(list)
        for unit in units:
            for path in dict.fromkeys(place.path for place in unit.places):
                by_path[path].append(unit)
        biases = self._trained_biases()
        return {path: self._delta(path, by_path[path], biases.get(path)) for path in dict.fromkeys((*by_path, *biases))}

    def _delta(self, path: Path, units: Sequence[Unit], trained: np.ndarray | None) -> Delta:
        a, b = self._products(path, units)
        magnitude, bias = self._magnitude(path, units, a, b), self._bias(path, units)
        if trained is not None:
            bias = trained if bias is None else bias + trained
        if not all(np.isfinite(values).all() for values in (a, b, magnitude, bias) if values is not None):
            raise AdapterError(f"the adapter's change of {'/'.join(path)} is too large for float32")
        return Delta(a, b, magnitude, bias)

    def _products(self, path: Path, units: Sequence[Unit]) -> tuple[np.ndarray, np.ndarray]:
        place, experts = self._of(path)
        ranks = [sum(unit.rank for unit in units if _expert(unit) == expert) for expert in experts]
        a = np.zeros((len(experts), max(ranks), place.sizes[0]), np.float32)
        b = np.stack([room_for(place, max(ranks)) for _ in experts])
        reached = dict.fromkeys(experts, 0)
        for unit in units:
            at = _expert(unit)
            rows = slice(reached[at], reached[at] + unit.rank)
            a[at or 0, rows] = unit.a
            _put(path, unit, unit.b, b[at or 0][..., rows])
            reached[at] = rows.stop
        return (a, b) if place.expert is not None else (a[0], b[0])

    def _of(self, path: Path) -> tuple[Place, list[int | None]]:
        """Return any place of a parameter, and its experts; [None] without experts."""
        place = self.places.of_paths[path]
        return place, [None] if place.expert is None else list(range(self.specs[path].shape[0]))

    def _outputs(self, path: Path, units: Sequence[Unit], name: str, start: float) -> np.ndarray | None:
        """Return one value for each output of a parameter, from the attribute ``name`` of its units."""
        if all(getattr(unit, name) is None for unit in units):
            return None
        place, experts = self._of(path)
        values = np.stack([room_for(place, 1) for _ in experts]) + np.float32(start)
        for unit in units:
            if (own := getattr(unit, name)) is not None:
                _put(path, unit, own[:, None], values[_expert(unit) or 0])
        return values[..., 0] if place.expert is not None else values[0, ..., 0]

    def _bias(self, path: Path, units: Sequence[Unit]) -> np.ndarray | None:
        return self._outputs(path, units, "bias", 0.0)

    def _magnitude(self, path: Path, units: Sequence[Unit], a: np.ndarray, b: np.ndarray) -> np.ndarray | None:
        """Return DoRA's magnitude over the norm of the weight it scales; 1 for outputs of modules without one."""
        magnitudes = self._outputs(path, units, "magnitude", np.nan)
        if magnitudes is None:
            return None
        weight = np.asarray(self.base_of(path, "use_dora"), np.float32)
        weight = np.moveaxis(weight, input_axis(path, self.specs[path]), -1)
        norms = np.linalg.norm((weight + _product(a, b)).astype(np.float64), axis=-1)
        if not (norms > 0).all():
            raise AdapterError(f"use_dora: outputs of {'/'.join(path)} are zero, and cannot be scaled to a norm")
        with np.errstate(over="ignore"):
            return np.where(np.isnan(magnitudes), 1.0, magnitudes / norms).astype(np.float32)

    def base_of(self, path: Path, why: str) -> np.ndarray:
        """Return the model's own parameter; raise AdapterError if there is no access to it."""
        if self.base is None:
            raise AdapterError(f"{why}: the adapter needs the model's own {'/'.join(path)}, which is not at hand")
        return self.base(path)

    def _trained_biases(self) -> dict[Path, Float32[np.ndarray, "*out"]]:
        """Return the bias changes of each parameter, for biases in the file that replace the model's.

        Also checks that embeddings and a head's bias saved with an adapter equal the model's.
        """
        added: dict[Path, np.ndarray] = {}
        for module, tensors in self.files.modules.items():
            if BASE_WEIGHT in tensors:
                self._require_copy(module, tensors[BASE_WEIGHT])
            if BIAS in tensors:
                self._add_bias(module, tensors[BIAS], added)
        return added

    def _require_copy(self, module: str, info: TensorInfo) -> None:
        places = self.places.modules.get(module, ())
        if len(places) != 1 or places[0].source.shape != info.shape or places[0].source.transpose:
            raise AdapterError(f"tensor {quoted(info.name)} of {self.files.folder} has no place in the model")
        self._require_equal(info, self.base_of(places[0].path, BASE_WEIGHT), self.files.read(info))

    def _require_equal(self, info: TensorInfo, own: np.ndarray, copy: np.ndarray) -> None:
        if own.shape != copy.shape or np.abs(own - copy).max(initial=0.0) > COPY_TOLERANCE * np.abs(copy).max():
            raise AdapterError(f"tensor {quoted(info.name)} of {self.files.folder} is not the model's own")

    def _add_bias(self, module: str, info: TensorInfo, added: dict[Path, np.ndarray]) -> None:
        is_saved = WEIGHT in self.files.modules[module]
        is_copy = self.config.bias == "none" and not is_saved
        if is_copy and not info.name.endswith(BASE_BIAS):
            raise AdapterError(f"tensor {quoted(info.name)} is there, but adapter_config.json says bias: none")
        sources, values = self.places.biases.get(module, ()), self.files.read(info)
        if not sources or any(source.shape != info.shape for _, source in sources):
            raise AdapterError(f"tensor {quoted(info.name)} of {self.files.folder} has no place in the model")
        for path, source in sources:
            own = np.asarray(self.base_of(path, "bias"), np.float32)
            if is_copy:
                self._require_equal(info, own[(*source.where, ...)], values_at(source, values))
                continue
            if is_saved and is_cast(values_at(source, values), own[(*source.where, ...)], info):
                continue
            change = values_at(source, values) - own[(*source.where, ...)]
            if module not in self.places.modules:
                if change.any():
                    raise AdapterError(f"bias: {quoted(info.name)} changes a bias that is not served")
                continue
            weight = self.places.modules[module][0].path
            room = added.setdefault(weight, np.zeros(own.shape, np.float32))
            room[(*source.where, ...)] += change


def _expert(unit: Unit) -> int | None:
    return unit.places[0].expert


def _put(path: Path, unit: Unit, values: np.ndarray, buffer: np.ndarray) -> None:
    for place in unit.places:
        if place.path == path:
            place.put(values, buffer)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return B A, for each expert: [*experts, *out, in]."""
    if a.ndim == 2:
        return b @ a
    return np.stack([one_b @ one_a for one_a, one_b in zip(a, b, strict=True)])
