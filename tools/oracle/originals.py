"""Third-party draft heads, imported from a checkout of their sources. None of their code is in this repository.

Their programs import more than their heads need, some of it from obsolete versions of transformers. Modules that the
heads do not need are replaced by empty ones during the import.
"""

from __future__ import annotations

import contextlib
import importlib
import pathlib
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch


@contextlib.contextmanager
def _importing(checkout: pathlib.Path, stubs: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Put ``checkout`` first on the path, and replace the modules named in ``stubs`` by the given contents."""
    if not checkout.is_dir():
        raise FileNotFoundError(f"{checkout}: no such checkout")
    replaced = {name: sys.modules[name] for name in stubs if name in sys.modules}
    for name, content in stubs.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)
    sys.path.insert(0, str(checkout))
    try:
        yield
    finally:
        sys.path.remove(str(checkout))
        for name in stubs:
            del sys.modules[name]
        sys.modules.update(replaced)


class _Attributes:
    """transformers' PretrainedConfig as of 2023: arguments become attributes, ``rope_scaling`` unchanged."""

    def __init__(self, **told: Any) -> None:
        vars(self).update(told)


def eagle(checkout: pathlib.Path) -> types.SimpleNamespace:
    """Import ``Eagle3`` and ``Eagle1`` (Model of cnets.py and of cnets1.py) and ``Config`` of SafeAILab/EAGLE."""
    with _importing(checkout, {"transformers.configuration_utils": {"PretrainedConfig": _Attributes}}):
        configs = importlib.import_module("eagle.model.configs")
    with _importing(checkout, {}):
        third, first = (importlib.import_module(f"eagle.model.{name}") for name in ("cnets", "cnets1"))
    return types.SimpleNamespace(Eagle3=third.Model, Eagle1=first.Model, Config=configs.EConfig)


def specforge(checkout: pathlib.Path) -> types.SimpleNamespace:
    """Import ``Model`` (LlamaForCausalLMEagle3) of sgl-project/SpecForge, without its distributed training."""
    stubs: dict[str, dict[str, Any]] = {
        "specforge.modeling.draft": {"__path__": [str(checkout / "specforge" / "modeling" / "draft")]},
        "specforge.utils": {"print_with_rank": lambda message: None},
        "specforge.distributed": {"get_sp_ring_group": None, "get_sp_ulysses_group": None},
    }
    with _importing(checkout, stubs), warnings.catch_warnings(action="ignore"):  # flash_attn is missing
        module = importlib.import_module("specforge.modeling.draft.llama3_eagle")
    return types.SimpleNamespace(Model=module.LlamaForCausalLMEagle3)


def speculators(folder: pathlib.Path) -> types.SimpleNamespace:
    """Import ``Model`` and ``Config`` of EAGLE-3 in the package speculators, without its readers of training data."""
    stubs: dict[str, dict[str, Any]] = {"speculators.train": {}, "speculators.train.data": {"BatchType": dict}}
    with _importing(folder, stubs):
        module = importlib.import_module("speculators.models.eagle3")
    return types.SimpleNamespace(Model=module.Eagle3DraftModel, Config=module.Eagle3SpeculatorConfig)


class Features(torch.nn.Module):
    """Replacement of Medusa's language model: its last hidden states are the given features."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    @staticmethod
    def model(input_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
        return (input_ids,)


class _NoTokenizer:
    @staticmethod
    def from_pretrained(name: str) -> None:
        return None


def medusa(checkout: pathlib.Path) -> types.SimpleNamespace:
    """Import Medusa: ``Model`` (MedusaModelABC over ``Features``), ``ResBlock``, ``evaluate_posterior``."""
    mistral = type("Mistral", (Features,), {})
    stubs: dict[str, dict[str, Any]] = {
        "medusa.model.modeling_llama_kv": {"LlamaForCausalLM": Features},
        "medusa.model.modeling_mistral_kv": {"MistralForCausalLM": mistral},
    }
    with _importing(checkout, stubs):
        module = importlib.import_module("medusa.model.medusa_model")
        utils = importlib.import_module("medusa.model.utils")
    module.AutoTokenizer = _NoTokenizer  # type: ignore[attr-defined]  # it would ask a hub
    return types.SimpleNamespace(
        Model=module.MedusaModelLlama, ResBlock=module.ResBlock, evaluate_posterior=utils.evaluate_posterior
    )
