"""The adapters of a model that is served."""

from __future__ import annotations

import pathlib

from jaxinfer.config import EngineConfig
from jaxinfer.lora.adapter import Adapter
from jaxinfer.lora.merge import declared, model_base
from jaxinfer.lora.parts import parts, require_fit
from jaxinfer.lora.peft.read import read_adapter
from jaxinfer.lora.store import LoRAStore
from jaxinfer.models.model import Model
from jaxinfer.quant.banks import lora_targets


def open_store(model: Model, config: EngineConfig) -> LoRAStore:
    """A store that reads PEFT's folders for a model, as an engine of these settings takes them."""
    specs, base = declared(model), model_base(model)
    targets = lora_targets(specs, specs, config.max_lora_rank)  # without the copies of heads that a mesh may need

    def read(path: str) -> Adapter:
        adapter = read_adapter(pathlib.Path(path), specs, max_rank=config.max_lora_rank, base=base)
        require_fit(adapter, targets)
        return adapter

    return LoRAStore(read, lambda adapter: parts(adapter, targets), config.host_loras)
