"""Engines whose programs differ in their outputs and in the values that their code closes over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxinfer.models.model import Model, abstract
from tests.engine.test_states import CONFIG
from tests.fakes import llama_json, random_head
from tools.check_programs.stored import stored


def llama(**changes: Any) -> Model:
    return abstract(llama_json(num_hidden_layers=1, **changes), "float32")


def drafting() -> Model:
    return llama().replace(draft=llama(intermediate_size=16))


def headed() -> Model:
    model = abstract(llama_json(num_hidden_layers=4), "float32")
    return model.replace(draft=random_head("eagle3", model))


def with_states() -> Model:
    return abstract(CONFIG | {"num_hidden_layers": 2, "layer_types": CONFIG["layer_types"][:2]}, "float32")


VARIANTS: dict[str, tuple[Callable[[], Model], dict[str, Any]]] = {
    "plain": (llama, {}),
    "several steps": (llama, {"multi_step": 3, "max_logprobs": 2}),
    "adapters": (llama, {"enable_lora": True, "max_loras": 2}),
    "states": (with_states, {}),
    "stored": (lambda: stored(llama(hidden_size=128, intermediate_size=128), "int4"), {}),
    "8-bit pages": (llama, {"kv_cache_dtype": "fp8", "swap_space_gib": 0.01}),
    "a draft model": (drafting, {"speculative": "draft_model"}),
    "a draft head": (headed, {"speculative": "eagle3"}),
}
