"""OLMo 2 and 3: attention and MLP with post-norms instead of pre-norms, and a QK norm over all heads.

OLMo 3 adds sliding windows in three of four layers, with a separate rotary embedding for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Hidden, HiddenAndCache, Positions
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.models.config import SLIDING_WINDOW, ConfigReader, layer_rope, sliding_layers
from jaxinfer.models.decoder import Decoder, PostNormBlock
from jaxinfer.models.families.llama import LlamaConfig, attention_specs, llama_fields
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, decoder, gated_mlp, heads_norm, rms_norm
from jaxinfer.types import LayerSpec, ParamTree

# Defaults of transformers for fields missing from config.json.
_DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
}
_THETA3 = 500_000.0


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class OlmoConfig(LlamaConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`. ``local_rope``: RoPE of sliding-window layers."""

    local_rope: RopeConfig

    @staticmethod
    def from_olmo2(config: Mapping[str, Any]) -> OlmoConfig:
        """Read config.json; raises as `decoder_fields` does."""
        fields = llama_fields(ConfigReader(config, _DEFAULTS)) | {"mlp_bias": False}
        return OlmoConfig(**fields, local_rope=fields["rope"])

    @staticmethod
    def from_olmo3(config: Mapping[str, Any]) -> OlmoConfig:
        """Read config.json; raises as `decoder_fields` does."""
        read = ConfigReader(config, _DEFAULTS)
        ropes = _ropes(read)
        # `llama_fields` reads one rotary embedding for all layers
        fields = llama_fields(ConfigReader({**config, "rope_parameters": None, "rope_scaling": None}, _DEFAULTS))
        rope, local = (layer_rope(read, scaling, fields["max_position"], fields["head_dim"]) for scaling in ropes)
        near = local_layers(read, 4)
        return OlmoConfig(
            **{**fields, "layers": windowed(read, near), "mlp_bias": False, "rope": rope}, local_rope=local
        )


def local_layers(read: ConfigReader, every: int) -> list[bool]:
    """Read which layers have a sliding window: from ``layer_types``, or all except each ``every``th."""
    count = read.positive("num_hidden_layers")
    return sliding_layers(read) or [(index + 1) % every != 0 for index in range(count)]


def windowed(read: ConfigReader, local: Sequence[bool]) -> tuple[LayerSpec, ...]:
    """Read ``sliding_window`` for the layers that have a window; it must not be null if there are any."""
    null = "sliding_window" in read.fields and read.fields["sliding_window"] is None
    read.require(not (null and any(local)), "sliding_window", "must be > 0: there are layers with a window")
    window = read.positive("sliding_window", SLIDING_WINDOW) if any(local) else None
    return tuple(LayerSpec(window if near else None) for near in local)


def _ropes(read: ConfigReader) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the RoPE fields of full-attention layers, and of sliding-window layers.

    Top-level fields apply to full-attention layers, as in transformers.
    """
    for name in ("rope_parameters", "rope_scaling"):
        value = read.fields.get(name)
        read.require(value is None or isinstance(value, dict), name, "must be an object")
    both: dict[str, Any] = read.fields.get("rope_parameters") or {}
    wide, near = (both.get(name) or {} for name in ("full_attention", "sliding_attention"))
    known = isinstance(wide, dict) and isinstance(near, dict) and both.keys() <= {"full_attention", "sliding_attention"}
    read.require(known, "rope_parameters", "must hold objects for full_attention and sliding_attention")
    top = {"rope_theta": read.number("rope_theta", _THETA3)}
    return {**top, **wide, **(read.fields.get("rope_scaling") or {})}, {"rope_theta": _THETA3, **near}


class OlmoBlock(PostNormBlock):
    """A decoder layer."""

    config: OlmoConfig

    def setup(self) -> None:
        cfg = self.config
        sizes = cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer
        biases = cfg.qkv_bias, cfg.out_bias
        self.attention = Attention(*sizes, *biases, qk_norm_eps=cfg.norm_eps, qk_norm_whole=True)
        self.attention_out_norm, self.mlp_out_norm = RMSNorm(cfg.norm_eps), RMSNorm(cfg.norm_eps)
        self.mlp = GatedMLP(cfg.activation)

    def __call__(self, x: Hidden, ropes: tuple[Any, Any], attend: Attend, cache: Any) -> HiddenAndCache:
        return super().__call__(x, ropes[self.layer.window is not None], attend, cache)


class Olmo(Decoder):
    """The Olmo decoder: see `Decoder`. Its context is the cosines and sines of both rotary embeddings."""

    config: OlmoConfig
    block_type = OlmoBlock

    def context(self, positions: Positions) -> tuple[Any, Any]:
        cfg = self.config
        wide = cfg.rope.angles(positions, cfg.head_dim)
        return wide, wide if cfg.local_rope == cfg.rope else cfg.local_rope.angles(positions, cfg.head_dim)


def param_specs(cfg: OlmoConfig) -> ParamTree:
    return decoder(cfg, lambda _, prefix: _block_specs(cfg, prefix))


def _block_specs(cfg: OlmoConfig, prefix: str) -> dict[str, Any]:
    attention, d = f"{prefix}.self_attn", cfg.hidden_size
    norms = {
        "q_norm": heads_norm(f"{attention}.q_norm.weight", cfg.heads, cfg.head_dim),
        "k_norm": heads_norm(f"{attention}.k_norm.weight", cfg.kv_heads, cfg.head_dim),
    }
    return {
        "attention": attention_specs(cfg, attention) | norms,
        "attention_out_norm": rms_norm(f"{prefix}.post_attention_layernorm", d),
        "mlp": gated_mlp(f"{prefix}.mlp", d, cfg.intermediate_size),
        "mlp_out_norm": rms_norm(f"{prefix}.post_feedforward_layernorm", d),
    }


OLMO2 = Family(OlmoConfig.from_olmo2, param_specs, cache_spec, Olmo)
OLMO3 = dataclasses.replace(OLMO2, config=OlmoConfig.from_olmo3)
