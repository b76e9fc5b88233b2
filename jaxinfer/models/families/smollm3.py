"""SmolLM3: Llama with some layers without position embeddings (NoPE, Kazemnejad et al. 2023)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxinfer.layers.attention import Attend
from jaxinfer.layers.base import Hidden, HiddenAndCache
from jaxinfer.models.config import ConfigReader, sliding_layers
from jaxinfer.models.families.llama import Llama, LlamaBlock, LlamaConfig, llama_fields, param_specs
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec
from jaxinfer.types import LayerSpec

# Defaults of transformers for fields missing from config.json.
_DEFAULTS = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
}
_EVERY = 4


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class SmolLM3Config(LlamaConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`. ``rotated``: whether each layer uses RoPE."""

    rotated: tuple[bool, ...]

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> SmolLM3Config:
        """Read config.json; raises as `decoder_fields` does."""
        read = ConfigReader(config, _DEFAULTS)
        fields, rotated = llama_fields(read), _rotated(read)
        return SmolLM3Config(**{**fields, "layers": _layers(read, rotated)}, rotated=rotated)


def _rotated(read: ConfigReader) -> tuple[bool, ...]:
    """Read which layers have rotary embeddings: ``no_rope_layers`` has a 1 for each of them."""
    count, known = read.positive("num_hidden_layers"), read.get("no_rope_layers")
    if known is None:
        every = read.positive("no_rope_layer_interval", _EVERY)
        return tuple((index + 1) % every != 0 for index in range(count))
    flags = isinstance(known, list) and len(known) >= count and all(type(flag) in (int, bool) for flag in known)
    read.require(flags, "no_rope_layers", f"must have a 0 or a 1 for each of {count} layers")
    return tuple(bool(flag) for flag in known[:count])


def _layers(read: ConfigReader, rotated: tuple[bool, ...]) -> tuple[LayerSpec, ...]:
    """Read the sliding windows, if they are used: of the NoPE layers, unless ``layer_types`` is given."""
    if not read.flag("use_sliding_window", False) or read.get("sliding_window") is None:
        named = sliding_layers(read)
        read.require(not any(named or ()), "layer_types", "needs use_sliding_window and sliding_window")
        return (LayerSpec(),) * len(rotated)
    window, local = read.positive("sliding_window"), sliding_layers(read) or [not turned for turned in rotated]
    return tuple(LayerSpec(window if near else None) for near in local)


class SmolLM3Block(LlamaBlock):
    """A decoder layer. ``rotated``: whether it has rotary embeddings."""

    rotated: bool = True

    def __call__(self, x: Hidden, rope: Any, attend: Attend, cache: Any) -> HiddenAndCache:
        return super().__call__(x, rope if self.rotated else None, attend, cache)


class SmolLM3(Llama):
    """The SmolLM3 decoder: see `Decoder`."""

    config: SmolLM3Config
    block_type = SmolLM3Block
    block_fields = ("layers", "rotated")


SMOLLM3 = Family(SmolLM3Config.from_json, param_specs, cache_spec, SmolLM3)
