"""jaxinfer: an LLM inference engine in JAX.

The names below are imported at first use, so that ``import jaxinfer`` is cheap and does not load jax.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer import research
    from jaxinfer.async_llm import AsyncLLM
    from jaxinfer.config import EngineConfig
    from jaxinfer.llm import LLM
    from jaxinfer.loading import load_model
    from jaxinfer.lora.door import LoRARequest
    from jaxinfer.models.model import Model
    from jaxinfer.outputs import RequestOutput
    from jaxinfer.sampling_params import RequestError, SamplingParams, Speculation
    from jaxinfer.serve.core.async_engine import AsyncEngine

_HOMES = {
    "AsyncEngine": "jaxinfer.serve.core.async_engine",
    "AsyncLLM": "jaxinfer.async_llm",
    "EngineConfig": "jaxinfer.config",
    "LLM": "jaxinfer.llm",
    "LoRARequest": "jaxinfer.lora.door",
    "Model": "jaxinfer.models.model",
    "RequestError": "jaxinfer.sampling_params",
    "RequestOutput": "jaxinfer.outputs",
    "SamplingParams": "jaxinfer.sampling_params",
    "Speculation": "jaxinfer.sampling_params",
    "__version__": "jaxinfer.version",
    "load_model": "jaxinfer.loading",
    "research": "jaxinfer.research",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "AsyncLLM",
    "EngineConfig",
    "LoRARequest",
    "Model",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Speculation",
    "load_model",
    "research",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as cause:
        if not (cause.name or "").startswith("jaxinfer."):
            raise
        raise ImportError(f"jaxinfer.{name} is not in jaxinfer-client: install jaxinfer, the whole of it") from cause
    value = globals()[name] = module if home == f"{__name__}.{name}" else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
