"""A model of the shape of Llama-3.1-8B with random weights, and the start of an engine."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.config import EngineConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.distributed.make import make_engine
from jaxinfer.gpu_check.measure import fill
from jaxinfer.gpu_check.report import Report
from jaxinfer.models.model import Model, abstract
from jaxinfer.parallel.mesh import make_mesh, param_sharding
from jaxinfer.types import ParamSpec

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
TINY = {
    **LLAMA_8B,
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def random_model(config_json: dict[str, Any], dtype: str = "bfloat16") -> Model:
    """Make a model of random weights; they are on the device when this returns."""
    model, mesh = abstract(config_json, dtype), make_mesh()
    leaves, tree = jax.tree.flatten(model.specs)
    params = [
        jax.device_put(_random_weight(spec, seed, dtype), param_sharding(mesh, spec))
        for seed, spec in enumerate(leaves)
    ]
    jax.block_until_ready(params)
    return model.replace(params=jax.tree.unflatten(tree, params))


def _random_weight(spec: ParamSpec, seed: int, dtype: str) -> jax.Array:
    if spec.init != "normal":
        return jnp.full(spec.shape, float(spec.init == "ones"), dtype)
    return fill(seed, spec.shape, dtype, spec.scale)


def start_engine(model: Model, config: EngineConfig, report: Report) -> EngineCore:
    """Start an engine whose pool takes the remaining memory, unless ``config`` sets its size."""

    def compiled(done: int, total: int) -> None:
        report.goes_on(f"{done} of {total} programs")

    return make_engine(model, config, jax.default_backend(), compiled)
