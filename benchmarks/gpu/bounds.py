"""Lower bounds on the bytes and operations of a step, by which measured times become shares of the device's rates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.model import Model


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
