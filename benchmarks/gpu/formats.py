"""Section formats: the engine with 8-bit pools, quantised weights and mixtures of experts, all of random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.gpu.throughput import measure, settings
from benchmarks.gpu_peers.loads import parse_loads
from jaxinfer.gpu_check.llama import LLAMA_8B, TINY
from jaxinfer.gpu_check.measure import fill
from jaxinfer.gpu_check.report import Report
from jaxinfer.models.model import Model, abstract
from tools.check_programs.stored import stored

LOADS, QUICK_LOADS = parse_loads("64x512+128,1x512+64"), parse_loads("2x20+4")
_START_S = 60.0

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,  # of 32: as many as fit into 80 GB in bfloat16
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
SPARSE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 24,  # of 48
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
# Config overrides that make the mixtures small enough to compile and run on any machine.
_TINY_MIXTURE = {
    **{name: TINY[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")},
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "moe_intermediate_size": 32,
    "head_dim": 32,
}


class Format(NamedTuple):
    """A model and its formats. ``weights`` is one of `tools.check_programs.stored.WEIGHTS`; None: unquantized."""

    name: str
    config: Mapping[str, Any]
    weights: str | None = None
    cache: str = "auto"


FORMATS = (
    Format("8B, int4", LLAMA_8B, "int4"),
    Format("8B, fp8", LLAMA_8B, "fp8"),
    Format("8B, fp8 weights and activations", LLAMA_8B, "fp8-activations"),
    Format("8B, pools of fp8", LLAMA_8B, cache="fp8"),
    Format("Mixtral, 8 layers", MIXTRAL),
    Format("Qwen3-30B-A3B, 24 layers", SPARSE),
    Format("8B, pools of int8", LLAMA_8B, cache="int8"),
    Format("8B, int8 weights and activations", LLAMA_8B, "int8-activations"),
    Format("Qwen3-30B-A3B, int4", {**SPARSE, "num_hidden_layers": 48}, "int4"),
)


def run(report: Report) -> None:
    for number, each in enumerate(FORMATS):
        if not report.time_for(each.name, 0.0 if report.quick else _START_S):
            continue
        with report.attempt(each.name):
            loads = QUICK_LOADS if report.quick else LOADS
            model = abstract(_small(each.config) if report.quick else dict(each.config), "bfloat16")
            model = _filled(stored(model, each.weights) if each.weights else model, number)
            measure(report, f"{each.name}: ", model, settings(loads, kv_cache_dtype=each.cache), loads)


def _small(config: Mapping[str, Any]) -> dict[str, Any]:
    if config["model_type"] == "llama":
        return {**TINY, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    return {**config, **_TINY_MIXTURE, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}


def _filled(model: Model, seed: int) -> Model:
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
