"""EXAONE 4: attention and MLP with post-norms instead of pre-norms, and a QK norm per head.

The large model has sliding windows in three of four layers; the other layers have no position embedding (NoPE).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Hidden, HiddenAndCache
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.models.config import ConfigReader, sliding_layers
from jaxinfer.models.decoder import PostNormBlock
from jaxinfer.models.families.llama import Llama, LlamaConfig, attention_specs, llama_fields
from jaxinfer.models.families.olmo import local_layers, windowed
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, decoder, gated_mlp, rms_norm
from jaxinfer.types import LayerSpec, ParamTree

# Defaults of transformers for fields missing from config.json.
_DEFAULTS = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
}
_PATTERN = 4
_PLAIN = {"attention_bias": False, "mlp_bias": False}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Exaone4Config(LlamaConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`. ``rotated``: whether each layer uses RoPE."""

    rotated: tuple[bool, ...]

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> Exaone4Config:
        """Read config.json; raises as `decoder_fields` does."""
        read = ConfigReader({**config, **_PLAIN}, _DEFAULTS)
        layers, null = _layers(read)
        rotated = tuple(null or layer.window is not None for layer in layers)
        return Exaone4Config(**{**llama_fields(read), "layers": layers, "qk_norm": True}, rotated=rotated)


def _layers(read: ConfigReader) -> tuple[tuple[LayerSpec, ...], bool]:
    """Read the windows of the layers, and whether there are none at all (``sliding_window`` null)."""
    null = "sliding_window" in read.fields and read.fields["sliding_window"] is None
    if null:
        return windowed(read, sliding_layers(read) or [False] * read.positive("num_hidden_layers")), True
    named = sliding_layers(read)  # files with it publish the pattern as a string, "LLLG"
    local = named if named is not None else local_layers(read, read.positive("sliding_window_pattern", _PATTERN))
    return windowed(read, local), False


class Exaone4Block(PostNormBlock):
    """A decoder layer. ``rotated``: whether it has rotary embeddings."""

    config: Exaone4Config
    rotated: bool

    def setup(self) -> None:
        cfg = self.config
        sizes = cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer
        self.attention = Attention(*sizes, qk_norm_eps=cfg.norm_eps)
        self.attention_out_norm, self.mlp_out_norm = RMSNorm(cfg.norm_eps), RMSNorm(cfg.norm_eps)
        self.mlp = GatedMLP(cfg.activation)

    def __call__(self, x: Hidden, rope: Any, attend: Attend, cache: Any) -> HiddenAndCache:
        return super().__call__(x, rope if self.rotated else None, attend, cache)


class Exaone4(Llama):
    """The Exaone4 decoder: see `Decoder`."""

    config: Exaone4Config
    block_type = Exaone4Block
    block_fields = ("layers", "rotated")


def param_specs(cfg: Exaone4Config) -> ParamTree:
    return decoder(cfg, lambda _, prefix: _block_specs(cfg, prefix))


def _block_specs(cfg: Exaone4Config, prefix: str) -> dict[str, Any]:
    d = cfg.hidden_size
    return {
        "attention": attention_specs(cfg, f"{prefix}.self_attn"),
        "attention_out_norm": rms_norm(f"{prefix}.post_attention_layernorm", d),
        "mlp": gated_mlp(f"{prefix}.mlp", d, cfg.intermediate_size),
        "mlp_out_norm": rms_norm(f"{prefix}.post_feedforward_layernorm", d),
    }


EXAONE4 = Family(Exaone4Config.from_json, param_specs, cache_spec, Exaone4)
