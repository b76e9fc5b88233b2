"""Models of random weights, wide enough that computation dominates the time."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.model import Model, abstract
from jaxinfer.weights import init_params

_SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
EXPERTS: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def model(**changes: Any) -> Model:
    """Build a float32 Llama of 8 layers; ``changes`` replace fields of its config.json."""
    described = abstract({**_SHAPE, **changes}, "float32", "random")
    return described.replace(params=init_params(described.specs, 0))
