"""A model of the shape of Llama-3.1-8B with random weights, and lower bounds on the bytes and operations of a step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.gpu_check.measure import fill
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


def random_model(config_json: dict[str, Any]) -> Model:
    """Make a model of random bfloat16 weights; they are on the device when this returns."""
    model, mesh = abstract(config_json, "bfloat16"), make_mesh()
    leaves, tree = jax.tree.flatten(model.specs)
    params = [
        jax.device_put(_random_weight(spec, seed), param_sharding(mesh, spec)) for seed, spec in enumerate(leaves)
    ]
    jax.block_until_ready(params)
    return model.replace(params=jax.tree.unflatten(tree, params))


def _random_weight(spec: ParamSpec, seed: int) -> jax.Array:
    if spec.init != "normal":
        return jnp.full(spec.shape, float(spec.init == "ones"), jnp.bfloat16)
    return fill(seed, spec.shape, jnp.bfloat16, spec.scale)


def filled(model: Model, seed: int = 0) -> Model:
    """Fill a model of abstract parameters, also quantised ones, with random numbers on the device; wait for them."""
    leaves, tree = jax.tree.flatten(model.params)
    params = [_random_numbers(leaf, 1000 * seed + number) for number, leaf in enumerate(leaves)]
    jax.block_until_ready(params)
    return model.replace(params=jax.tree.unflatten(tree, params))


def _random_numbers(leaf: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    """Return random codes over the full integer range; values near 0.02 for floating-point vectors and scales."""
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        least, most = int(jnp.iinfo(leaf.dtype).min), int(jnp.iinfo(leaf.dtype).max)
        middle, half = (least + most + 1) / 2, (most - least) / 2
        return (fill(seed, leaf.shape, jnp.float32, half) + middle).astype(leaf.dtype)
    return fill(seed, leaf.shape, leaf.dtype, 0.03)


def weight_bytes(model: Model) -> tuple[int, int]:
    """Return the bytes of all weights, and of the weights that a decode step reads: all but an untied embedding."""
    total, embedding = (sum(map(_bytes, jax.tree.leaves(of))) for of in (model.params, model.params["embed"]["table"]))
    return total, total - (0 if model.config.tied else embedding)


def _bytes(leaf: jax.Array) -> int:
    """Return the bytes of an array on a GPU, where two 4-bit numbers share a byte."""
    bits = jnp.iinfo(leaf.dtype).bits if jnp.issubdtype(leaf.dtype, jnp.integer) else 8 * leaf.dtype.itemsize
    return leaf.size * bits // 8


def bytes_per_token(model: Model, page: int) -> int:
    """Return the bytes of a token's keys and values in all layers, 16 bits a number unless the cache sets a dtype."""
    return model.cache_spec.bytes_per_page(page, 2) // page


def prefill_operations(config_json: dict[str, Any], start: int, tokens: int) -> int:
    """Return the fewest floating-point operations of a prefill chunk; masked positions do not count.

    The last layer computes only keys and values, since no later layer uses its output. The LM head does not run.
    """
    hidden, wide = config_json["hidden_size"], config_json["intermediate_size"]
    heads, kv_heads = config_json["num_attention_heads"], config_json["num_key_value_heads"]
    key_value = 2 * hidden * (hidden // heads) * kv_heads
    layer = 2 * hidden * hidden + key_value + 3 * hidden * wide
    layers = config_json["num_hidden_layers"]
    seen = tokens * start + tokens * (tokens + 1) // 2
    return 2 * tokens * ((layers - 1) * layer + key_value) + (layers - 1) * 4 * hidden * seen
