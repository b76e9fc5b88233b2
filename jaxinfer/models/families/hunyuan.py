"""Hunyuan dense models: Llama with a QK norm after RoPE."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxinfer.layers.attention import Attention
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.families.llama import Llama, LlamaBlock, LlamaConfig, block_specs, llama_fields
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, decoder, gated_mlp, rms_norm
from jaxinfer.types import ParamTree

# Defaults of transformers for fields missing from config.json.
_DEFAULTS = {
    "vocab_size": 290943,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
}


def config_from_json(config: Mapping[str, Any]) -> LlamaConfig:
    """Read config.json; raises as `decoder_fields` does."""
    fields = llama_fields(ConfigReader(_stretched({**config, "mlp_bias": False}), _DEFAULTS))
    return LlamaConfig(**fields | {"qk_norm": True})


def _stretched(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert the checkpoints' "dynamic" scaling with an ``alpha`` to a larger theta, for texts of any length."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(name)
    if not isinstance(scaling, dict) or not scaling.get("alpha"):
        return config
    inner, read = ConfigReader(scaling), ConfigReader(config, _DEFAULTS)
    if inner.text("rope_type", inner.text("type", "default")) != "dynamic":
        return config
    alpha, theta = inner.number("alpha"), inner.number("rope_theta", read.number("rope_theta", 1e4))
    dim = read.positive("head_dim", read.positive("hidden_size") // read.positive("num_attention_heads"))
    inner.require(0.0 < alpha <= 2**20, "alpha", "must be > 0 and at most 2**20")
    read.require(dim > 2, "head_dim", "must be > 2 where rope_type is dynamic")
    grown = {"rope_type": "default", "rope_theta": theta * alpha ** (dim / (dim - 2))}
    return {**config, "rope_scaling": None, "rope_parameters": grown}


class LateNormAttention(Attention):
    """`Attention` with its QK norm after RoPE."""

    def encoded(
        self, q: jax.Array, k: jax.Array, rope: tuple[jax.Array, jax.Array] | None
    ) -> tuple[jax.Array, jax.Array]:
        q, k = (q, k) if rope is None else self.rotated(q, k, rope)
        return self.q_norm(q), self.k_norm(k)


class HunyuanBlock(LlamaBlock):
    """A decoder layer."""

    kind = LateNormAttention


class Hunyuan(Llama):
    """The Hunyuan decoder: see `Decoder`."""

    block_type = HunyuanBlock


def param_specs(cfg: LlamaConfig) -> ParamTree:
    return decoder(cfg, lambda _, prefix: _block_specs(cfg, prefix))


def _block_specs(cfg: LlamaConfig, prefix: str) -> dict[str, Any]:
    mlp = gated_mlp(f"{prefix}.mlp", cfg.hidden_size, cfg.intermediate_size)
    tree = block_specs(dataclasses.replace(cfg, qk_norm=False), prefix, mlp)
    tree["attention"] |= {
        "q_norm": rms_norm(f"{prefix}.self_attn.query_layernorm", cfg.head_dim),
        "k_norm": rms_norm(f"{prefix}.self_attn.key_layernorm", cfg.head_dim),
    }
    return tree


HUNYUAN = Family(config_from_json, param_specs, cache_spec, Hunyuan)
