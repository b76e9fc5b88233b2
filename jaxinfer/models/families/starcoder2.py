"""StarCoder2 (Lozhkov et al. 2024): Llama with layer norms, an ungated MLP, and biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.layers.base import Layer
from jaxinfer.layers.mlp import MLP
from jaxinfer.layers.norm import LayerNorm
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.decoder import LayerNormDecoder
from jaxinfer.models.families.llama import LlamaBlock, LlamaConfig, block_specs, llama_fields
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, decoder, layer_norm, plain_mlp
from jaxinfer.types import LayerSpec, ParamTree

# Defaults of transformers for fields missing from config.json.
_DEFAULTS = {
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "tie_word_embeddings": True,
}
_NAMES = {"rms_norm_eps": "norm_epsilon", "attention_bias": "use_bias"}


def config_from_json(config: Mapping[str, Any]) -> LlamaConfig:
    """Read config.json; raises as `decoder_fields` does."""
    read = ConfigReader(config, _DEFAULTS, _NAMES)
    fields = llama_fields(read)
    window = None if read.get("sliding_window") is None else read.positive("sliding_window")
    layers = tuple(LayerSpec(window) for _ in fields["layers"])
    return LlamaConfig(**{**fields, "layers": layers, "mlp_bias": fields["qkv_bias"]})


class Starcoder2Block(LlamaBlock):
    """A decoder layer."""

    def norm(self) -> Layer:
        return LayerNorm(self.config.norm_eps)

    def network(self) -> Layer:
        return MLP(self.config.activation, self.config.mlp_bias)


class Starcoder2(LayerNormDecoder):
    config: LlamaConfig
    block_type = Starcoder2Block


def param_specs(cfg: LlamaConfig) -> ParamTree:

    def block(_: int, prefix: str) -> dict[str, Any]:
        mlp = f"{prefix}.mlp"
        sizes = cfg.hidden_size, cfg.intermediate_size, cfg.mlp_bias
        return block_specs(cfg, prefix, plain_mlp(f"{mlp}.c_fc", f"{mlp}.c_proj", *sizes), layer_norm)

    return decoder(cfg, block, final_norm=layer_norm("model.norm", cfg.hidden_size))


STARCODER2 = Family(config_from_json, param_specs, cache_spec, Starcoder2)
