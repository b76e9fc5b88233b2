"""Units of an adapter: tensors grouped by module, and checked against the configuration and the model."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float32

from jaxinfer.lora.errors import AdapterError
from jaxinfer.lora.peft.config import PeftConfig, ends_with
from jaxinfer.lora.peft.module_paths import Place, Places
from jaxinfer.lora.peft.tensors import AdapterFiles
from jaxinfer.weights.errors import listed, quoted
from jaxinfer.weights.safetensors.reader import TensorInfo

_log = logging.getLogger("jaxinfer")

Tensors = Mapping[str, TensorInfo]
LINEAR = ("lora_A.weight", "lora_B.weight")
EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
MAGNITUDE, LORA_BIAS = "lora_magnitude_vector", "lora_B.bias"
BASE_WEIGHT, BASE_BIAS, WEIGHT, BIAS = "base_layer.weight", "base_layer.bias", "weight", "bias"
OF_LORA = {*LINEAR, *EMBEDDING, MAGNITUDE, LORA_BIAS}


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """The low-rank product of a module, or of one expert of a stacked tensor.

    Attributes:
        places: locations of its outputs in the model.
        b: includes the scale.
    """

    places: tuple[Place, ...]
    a: Float32[np.ndarray, "rank in"]
    b: Float32[np.ndarray, "out rank"]
    magnitude: Float32[np.ndarray, " out"] | None = None
    bias: Float32[np.ndarray, " out"] | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclasses.dataclass(frozen=True)
class UnitReader:
    """Reads units. ``max_rank``: the largest supported rank."""

    files: AdapterFiles
    config: PeftConfig
    places: Places
    max_rank: int

    def units(self) -> list[Unit]:
        """Return all units of the adapter.

        Raises:
            AdapterError: the adapter does not fit its configuration or the model; the message names the tensor.
        """
        adapted = {name: tensors for name, tensors in self.files.modules.items() if tensors.keys() & OF_LORA}
        self._require_names()
        plans = [self._plan(name, tensors) for name, tensors in adapted.items()]
        self._require_some([name for name, _ in plans])
        return [unit for _, read in plans for unit in read()]

    def _plan(self, name: str, tensors: Tensors) -> tuple[str, functools.partial[Iterator[Unit]]]:
        """Check a module's tensors; return the name that PEFT's rules use, and a function that reads them later."""
        if name in self.places.modules:
            return name, self._plan_module(name, tensors)
        if (kind := self._fused(name, tensors)) is not None:
            return kind, self._plan_fused(kind, tensors)
        raise self._no_place(name, tensors)

    def _plan_module(self, name: str, tensors: Tensors) -> functools.partial[Iterator[Unit]]:
        places = self.places.modules[name]
        if not self.config.targets(self._theirs(name)):
            raise AdapterError(f"{self._one(tensors)} adapts a module that adapter_config.json does not target")
        kinds = EMBEDDING if places[0].of_rows else LINEAR
        self._require_kinds(name, tensors, kinds)
        inputs, out = places[0].sizes
        self._require_shapes(name, tensors, kinds, (inputs, out), 1)
        return functools.partial(self._read_module, name, tensors, kinds)

    def _require_kinds(self, name: str, tensors: Tensors, kinds: tuple[str, str]) -> None:
        wanted = {*kinds}
        wanted |= {MAGNITUDE} if self.config.use_dora else set()
        wanted |= {LORA_BIAS} if self.config.lora_bias and kinds == LINEAR else set()
        found = tensors.keys() & OF_LORA
        if missing := sorted(wanted - found):
            raise AdapterError(f"{self.files.folder} lacks {listed([f'{name}.{kind}' for kind in missing])}")
        if more := sorted(found - wanted):
            raise AdapterError(f"tensor {quoted(tensors[more[0]].name)} is none that adapter_config.json asks for")

    def _require_shapes(
        self, name: str, tensors: Tensors, kinds: tuple[str, str], sizes: tuple[int, int], experts: int
    ) -> None:
        rank = self.config.rank(self._theirs(name))
        if rank > self.max_rank:
            raise AdapterError(f"the adapter has rank {rank} at {name}, more than the {self.max_rank} of max_lora_rank")
        (inputs, out), total = sizes, rank * experts
        shapes = {kinds[0]: (total, inputs), kinds[1]: (out, total), MAGNITUDE: (out,), LORA_BIAS: (out,)}
        for kind, info in tensors.items():
            if kind in shapes and info.shape != shapes[kind]:
                raise AdapterError(f"tensor {quoted(info.name)} is {list(info.shape)}, not {list(shapes[kind])}")

    def _read_module(self, name: str, tensors: Tensors, kinds: tuple[str, str]) -> Iterator[Unit]:
        a, b = (self.files.read(tensors[kind]) for kind in kinds)
        magnitude = self.files.read(tensors[MAGNITUDE]) if MAGNITUDE in tensors else None
        bias = self._scaled(name, self.files.read(tensors[LORA_BIAS])) if LORA_BIAS in tensors else None
        yield Unit(self.places.modules[name], a, self._scaled(name, b), magnitude, bias)

    def _scaled(self, name: str, values: Float32[np.ndarray, "*shape"]) -> Float32[np.ndarray, "*shape"]:
        with np.errstate(over="ignore"):  # infinities are detected once all units are combined
            return np.float32(self.config.scale(self._theirs(name))) * values

    def _fused(self, name: str, tensors: Tensors) -> str | None:
        """Return the stacked expert tensor that is meant: two tensors of one module differ only in their sizes."""
        module = name
        while module.endswith(".base_layer"):
            module = module.removesuffix(".base_layer")
        shapes = [tensors[kind].shape if kind in tensors else () for kind in LINEAR]
        for kind in ("gate_up_proj", "down_proj"):
            experts = self.places.experts.get(f"{module}.{kind}")
            if experts is None or len(shapes[0]) != 2 or len(shapes[1]) != 2:
                continue
            if (shapes[0][1], shapes[1][0]) == experts[0][0].sizes and self._is_parameter(f"{module}.{kind}"):
                return f"{module}.{kind}"
        return None

    def _theirs(self, name: str) -> str:
        """Return the name that rules of the configuration use."""
        return self.files.naming.theirs(name)

    def _is_parameter(self, name: str) -> bool:
        return any(ends_with(self._theirs(name), target) for target in self.config.target_parameters)

    def _plan_fused(self, name: str, tensors: Tensors) -> functools.partial[Iterator[Unit]]:
        if self.config.use_dora or self.config.lora_bias:
            raise AdapterError("adapter_config.json: target_parameters cannot stand beside use_dora or lora_bias")
        experts = self.places.experts[name]
        self._require_kinds(name, tensors, LINEAR)
        self._require_shapes(name, tensors, LINEAR, experts[0][0].sizes, len(experts))
        return functools.partial(self._read_fused, name, tensors)

    def _read_fused(self, name: str, tensors: Tensors) -> Iterator[Unit]:
        """Yield a unit per expert: A is grouped by expert, then rank; B by rank, then expert."""
        experts = self.places.experts[name]
        a, b = (self.files.read(tensors[kind]) for kind in LINEAR)
        a, b = a.reshape(len(experts), -1, a.shape[-1]), self._scaled(name, b).reshape(b.shape[0], -1, len(experts))
        for expert, places in enumerate(experts):
            yield Unit(places, a[expert], b[:, :, expert])

    def _no_place(self, name: str, tensors: Tensors) -> AdapterError:
        have = listed(sorted({module.rpartition(".")[2] for module in self.places.modules}), 30)
        return AdapterError(f"{self._one(tensors)}: the model has no such module to adapt; it has {have}")

    def _one(self, tensors: Tensors) -> str:
        return f"tensor {quoted(next(iter(tensors.values())).name)} of {self.files.folder}"

    def _require_some(self, found: Sequence[str]) -> None:
        """Check that something is adapted, and nothing twice. Modules without tensors stay unchanged, as in PEFT."""
        if twice := [name for name, times in collections.Counter(found).items() if times > 1]:
            raise AdapterError(f"{self.files.folder} adapts twice: {listed(twice)}")
        if not found and not self.config.trainable_token_indices:
            raise AdapterError(f"{self.files.folder} adapts nothing: it has no tensors of LoRA")
        if missing := sorted({*self._targets(found)} - {*found}):
            _log.warning(
                f"{self.files.folder} lacks tensors of modules that it targets, which stay as they are: "
                f"{listed(missing)}"
            )

    def _targets(self, found: Sequence[str]) -> Iterator[str]:
        """Yield every module that the configuration targets."""
        yield from (name for name in self.places.experts if self._is_parameter(name))
        if self.config.all_linear:
            return
        # newer writers stack the experts of a layer in one tensor, which module names do not match
        experts = any(_of_expert(self.places.modules.get(name, ())) for name in found)
        for name, at in self.places.modules.items():
            if (experts or not _of_expert(at)) and self.config.targets(self._theirs(name)):
                yield name

    def _require_names(self) -> None:
        """Check that some name in each list of the configuration matches."""
        targets = self.config.target_modules
        self._require_meaning("target_modules", targets if isinstance(targets, tuple) else (), self.places.modules)
        self._require_meaning("target_parameters", self.config.target_parameters, self.places.experts)

    def _require_meaning(self, key: str, targets: Sequence[str], names: Mapping[str, object]) -> None:
        known = [self._theirs(name) for name in names]
        nothing = [target for target in targets if not any(ends_with(name, target) for name in known)]
        if not nothing:
            return
        have = listed(sorted({name.rpartition(".")[2] for name in names}), 30)
        said = f"adapter_config.json: {key}: nothing to adapt is called {listed(nothing)}; the model has {have}"
        if len(nothing) == len(targets):
            raise AdapterError(said)
        _log.warning(said)


def _of_expert(places: tuple[Place, ...]) -> bool:
    return any(place.expert is not None for place in places)
