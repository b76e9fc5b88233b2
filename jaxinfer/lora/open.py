"""Creation of the adapter store of a served model."""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Mapping

from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.lora.adapter import Adapter
from jaxinfer.lora.errors import AdapterError
from jaxinfer.lora.merge import declared, model_base
from jaxinfer.lora.parts import parts, require_fit
from jaxinfer.lora.peft.read import read_adapter
from jaxinfer.lora.store import LoRAStore
from jaxinfer.models.model import Model
from jaxinfer.quant.banks import Path, known_modules, lora_targets, module_names, spec_at
from jaxinfer.types import LoRATarget, ParamTree


def open_store(model: Model, config: EngineConfig) -> LoRAStore:
    """Return a store that takes PEFT folders, or adapters as arrays, within the limits of an engine config."""
    specs, base = declared(model), model_base(model)
    tower = model.vision is not None and config.mm_limits.get("image") != 0
    targets = lora_targets(specs, specs, config.max_lora_rank, _modules(specs, config))  # without replicated heads

    def read(source: str | Adapter) -> Adapter:
        if isinstance(source, Adapter):
            adapter = source.on_host()
        else:
            adapter = read_adapter(pathlib.Path(source), specs, max_rank=config.max_lora_rank, base=base, tower=tower)
        require_banks(adapter, specs, targets)
        return adapter

    return LoRAStore(read, lambda adapter: parts(adapter, targets), config.host_loras)


def _modules(specs: ParamTree, config: EngineConfig) -> Collection[str]:
    """Return the modules that the settings name.

    Raises:
        EngineConfigError: the model has no such module.
    """
    known = known_modules(specs)
    if unknown := [name for name in config.lora_target_modules if name not in known]:
        have = ", ".join(sorted(known))
        raise EngineConfigError(f"lora_target_modules = {unknown[0]!r} is no module of the model; it has {have}")
    return config.lora_target_modules


def require_banks(adapter: Adapter, specs: ParamTree, targets: Mapping[Path, LoRATarget]) -> None:
    """Raise ValueError if the banks of an engine have no room for an adapter.

    Args:
        specs: parameters as the family declares them.
        targets: weights that have banks (`lora_targets`).
    """
    for path in adapter.deltas:
        if path not in targets and (spec := spec_at(specs, path)) is not None:
            names = " or ".join(sorted(module_names(path, spec)))
            raise AdapterError(f"the adapter changes {'.'.join(path)}: lora_target_modules does not name {names}")
    require_fit(adapter, targets)
