"""Apertus (arXiv:2509.14233): Llama with QK norm, and xIELU in feed-forward networks without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.base import Layer
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.families.llama import Llama, LlamaBlock, LlamaConfig, attention_specs, llama_fields
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, decoder, plain_mlp, rms_norm
from jaxinfer.parallel.tokens import all_tokens, own_tokens
from jaxinfer.quant import matmul, matmul_transposed
from jaxinfer.types import ParamSpec, ParamTree, Source

# Defaults of transformers for fields missing from config.json.
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_DEFAULTS = {"rope_theta": 12e6, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "hidden_act": "xielu"}
_LEARNED = ("alpha_p", "alpha_n", "beta", "eps")


def config_from_json(config: Mapping[str, Any]) -> LlamaConfig:
    """Read config.json; raises as `decoder_fields` does."""
    said = config.get("rope_parameters") or config.get("rope_scaling")
    read = ConfigReader(config if said or "rope_theta" in config else {**config, "rope_parameters": _ROPE}, _DEFAULTS)
    read.choice("hidden_act", "xielu", ("xielu",))
    read.require(read.flag("qk_norm", True), "qk_norm", "is not supported")
    read.require(not read.flag("post_norm", False), "post_norm", "is not supported")
    read.require(not read.flag("mlp_bias", False), "mlp_bias", "is not supported")
    fields = llama_fields(ConfigReader({**read.fields, "hidden_act": "silu"}, _DEFAULTS))
    return LlamaConfig(**{**fields, "activation": "xielu"}, qk_norm=True)


class Xielu(Layer):
    """MLP down(xIELU(up(x))): a parabola above 0 and an exponential below (Huang & Schlag 2024), with learned slopes.

    Parameters: ``up`` and ``down`` [hidden, d]; ``alpha_p``, ``alpha_n``, ``beta`` and ``eps`` [1].
    """

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        hidden = matmul_transposed(all_tokens(x), self.weight("up"))
        above, below, beta, eps = (self.weight(name).astype(jnp.float32) for name in _LEARNED)
        h = hidden.astype(jnp.float32)
        positive = jax.nn.softplus(above) * h * h + beta * h
        negative = (jnp.expm1(jnp.minimum(h, eps)) - h) * (beta + jax.nn.softplus(below)) + beta * h
        return own_tokens(matmul(jnp.where(h > 0, positive, negative).astype(x.dtype), self.weight("down")))


class ApertusBlock(LlamaBlock):
    """A decoder layer."""

    def network(self) -> Layer:
        return Xielu()


class Apertus(Llama):
    """The Apertus decoder: see `Decoder`."""

    block_type = ApertusBlock


def param_specs(cfg: LlamaConfig) -> ParamTree:

    def block(_: int, prefix: str) -> dict[str, Any]:
        return {
            "attention_norm": rms_norm(f"{prefix}.attention_layernorm", cfg.hidden_size),
            "attention": attention_specs(cfg, f"{prefix}.self_attn"),
            "mlp_norm": rms_norm(f"{prefix}.feedforward_layernorm", cfg.hidden_size),
            "mlp": _network(cfg, f"{prefix}.mlp"),
        }

    return decoder(cfg, block)


def _network(cfg: LlamaConfig, mlp: str) -> dict[str, Any]:
    sizes = cfg.hidden_size, cfg.intermediate_size, False
    shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    sources = {name: Source(f"{mlp}.act_fn.{name}", shape, reshape=(1,)) for name, shape in shapes.items()}
    learned = {name: ParamSpec((1,), (None,), sources=(source,)) for name, source in sources.items()}
    return plain_mlp(f"{mlp}.up_proj", f"{mlp}.down_proj", *sizes) | learned


APERTUS = Family(config_from_json, param_specs, cache_spec, Apertus)
