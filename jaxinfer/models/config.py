"""Reading of config.json: every field is validated, and an error names the field and its value."""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.brief import ShortRepr
from jaxinfer.layers.mlp import ACTIVATIONS
from jaxinfer.layers.rope import RopeConfig, yarn_mscale
from jaxinfer.types import LayerSpec


class ConfigError(ValueError):
    """A config.json that is invalid or not supported. The message names the field and the value."""


_REQUIRED = object()

# Upper bounds: a larger parameter tree would take minutes and gigabytes to build before a checkpoint contradicts it.
_MOST_LAYERS = _MOST_EXPERTS = 1024
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), _MOST_LAYERS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _MOST_EXPERTS),
}
_SHORT = reprlib.Repr(maxstring=120, maxother=120, maxlist=20, maxdict=20, maxlevel=3)


def shown(value: object) -> str:
    """Format a value for a message, truncated if it is long."""
    return _SHORT.repr(value)


@dataclasses.dataclass(frozen=True)
class ConfigReader:
    """Typed access to the fields of config.json. A field that is absent or null takes its default.

    Attributes:
        defaults: defaults of the family; defaults of other fields are passed to each method.
        names: field names of the family, by the common names that methods take.
    """

    fields: Mapping[str, Any]
    defaults: Mapping[str, Any] = MappingProxyType({})
    names: Mapping[str, str] = MappingProxyType({})

    def spelled(self, name: str) -> str:
        """Return the family's name of a field."""
        return self.names.get(name, name)

    def get(self, name: str, default: Any = None) -> Any:
        """Read a field without validation."""
        value = self.fields.get(self.spelled(name))
        value = self.defaults.get(name, default) if value is None else value
        if value is _REQUIRED:
            raise ConfigError(f"config.json: {self.spelled(name)} is missing")
        return value

    def positive(self, name: str, default: Any = _REQUIRED) -> int:
        value = self.get(name, default)
        self.require(isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31, name, "must be > 0")
        most = _MOST.get(self.spelled(name), value)
        self.require(value <= most, name, f"must be at most {most}")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        value = self.get(name, default)
        real = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        self.require(real, name, "must be a finite number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        self.require(isinstance(value, bool), name, "must be true or false")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        value = self.get(name, default)
        self.require(isinstance(value, str), name, "must be a string")
        return value

    def choice(self, name: str, default: str, known: tuple[str, ...]) -> str:
        value = self.text(name, default)
        self.require(value in known, name, f"is not supported (known: {', '.join(known)})")
        return value

    def require(self, condition: bool, name: str, what: str) -> None:
        if not condition:
            name = self.spelled(name)
            raise ConfigError(f"config.json: {name} = {shown(self.fields.get(name))} {what}")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class DecoderConfig(ShortRepr):
    """Fields of a resolved config.json that all families share: no optional field is left open.

    Attributes:
        kv_heads, head_dim: sizes of the KV cache.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    max_position: int
    norm_eps: float
    activation: str
    tied: bool


def key_value_heads(read: ConfigReader, heads: int) -> int:
    """Read the number of KV heads: null means ``heads``, whatever the default of the family is."""
    name = read.spelled("num_key_value_heads")
    null = name in read.fields and read.fields[name] is None
    return heads if null else read.positive("num_key_value_heads", heads)


def decoder_fields(
    read: ConfigReader, *, mlp_ratio: int | None = None, head_dim: int | None = None, cut_heads: bool = False
) -> dict[str, Any]:
    """Read the fields of `DecoderConfig` except ``layers``, by the names that most families use.

    Args:
        mlp_ratio: a missing ``intermediate_size`` is this many hidden sizes (None: it is required).
        head_dim: head dim of the family, which overrides config.json.
        cut_heads: the head dim is always the hidden size divided by the heads; any other one is rejected.

    Raises:
        ConfigError: a field is missing, of the wrong type or not supported.
    """
    hidden, heads = read.positive("hidden_size"), read.positive("num_attention_heads")
    kv_heads, all_heads = key_value_heads(read, heads), f"{read.spelled('num_attention_heads')} ({heads})"
    read.require(heads % kv_heads == 0, "num_key_value_heads", f"must divide {all_heads}")
    read.require(not cut_heads or hidden % heads == 0, "hidden_size", f"must be a multiple of {all_heads}")
    cut = not cut_heads or read.fields.get("head_dim") in (None, hidden // heads)
    read.require(cut, "head_dim", f"is not supported: heads have {hidden // heads} numbers, hidden_size by heads")
    if head_dim is None:
        head_dim = hidden // heads if cut_heads else read.positive("head_dim", hidden // heads)
    return {
        "vocab_size": read.positive("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": read.positive("intermediate_size", mlp_ratio * hidden if mlp_ratio else _REQUIRED),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_position": read.positive("max_position_embeddings", 2048),
        "norm_eps": read.number("rms_norm_eps", 1e-6),
        "activation": read.choice("hidden_act", "silu", tuple(ACTIVATIONS)),
        "tied": read.flag("tie_word_embeddings", False),
    }


def renamed(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Rename fields of ``config`` that have two names: ``names`` maps one to the name that the family reads. If both
    are present, the first takes precedence, as in transformers."""
    return {**config, **{other: config[name] for name, other in names.items() if name in config}}


def aliased(read: Callable[[Mapping[str, Any]], Any], names: Mapping[str, str]) -> Callable[[Mapping[str, Any]], Any]:
    """Make a reader of config.json that also accepts other field names; ``names``: see `renamed`."""

    @functools.wraps(read)
    def config(config_json: Mapping[str, Any]) -> Any:
        return read(renamed(config_json, names))

    return config


# Defaults of `transformers` for fields missing from config.json; a null window means full attention.
SLIDING_WINDOW = 4096
_MAX_WINDOW_LAYERS = 28


def sliding_layers(read: ConfigReader) -> list[bool] | None:
    """Read from ``layer_types`` which layers have a sliding window; None: the field is missing."""
    kinds, count = read.get("layer_types"), read.positive("num_hidden_layers")
    if kinds is None:
        return None
    known = isinstance(kinds, list) and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
    read.require(known and len(kinds) == count, "layer_types", f"must name {count} full or sliding attentions")
    return [kind == "sliding_attention" for kind in kinds]


def qwen_window(read: ConfigReader) -> int | None:
    """Read the sliding window of Qwen models: null means none; an unused window may be 0."""
    if not read.flag("use_sliding_window", False) or read.fields.get("sliding_window", SLIDING_WINDOW) is None:
        return None
    return read.positive("sliding_window", SLIDING_WINDOW)


def max_window_layers(read: ConfigReader) -> int:
    """Read ``max_window_layers``: the number of first layers that Qwen models treat differently from the rest."""
    count = read.get("max_window_layers", _MAX_WINDOW_LAYERS)
    read.require(type(count) is int and count >= 0, "max_window_layers", "must be >= 0")
    return count


ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


def rope_config(
    read: ConfigReader, max_position: int, head_dim: int | None = None, partial: bool = False
) -> RopeConfig:
    """Read RoPE from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old).

    Args:
        max_position: context length of the model, from which a missing factor or original context is derived.
        head_dim: longrope's lists must have one factor per frequency of this head dim (None: unchecked).
        partial: whether the family supports partial rotation (``partial_rotary_factor``).
    """
    for name in ("rope_parameters", "rope_scaling"):
        value = read.fields.get(name)
        read.require(value is None or isinstance(value, dict), name, "must be an object")
    scaling: dict[str, Any] = read.fields.get("rope_scaling") or read.fields.get("rope_parameters") or {}
    return layer_rope(read, scaling, max_position, head_dim, partial)


def partial_rope(read: ConfigReader, fields: Mapping[str, Any]) -> RopeConfig:
    """Read the rotary embedding of a family that rotates a part of each head.

    Raises:
        ConfigError: a field is invalid, or the part is not a positive even number of dims.
    """
    dim = fields["head_dim"]
    rope = rope_config(read, fields["max_position"], dim, partial=True)
    size = int(dim * rope.partial)
    if size == 0 or size % 2:
        raise ConfigError(
            f"config.json: partial_rotary_factor = {rope.partial} rotates {size} of {dim} numbers of a head: "
            "it must be an even number of them"
        )
    return rope


def layer_rope(
    read: ConfigReader,
    scaling: Mapping[str, Any],
    max_position: int,
    head_dim: int | None = None,
    partial: bool = False,
) -> RopeConfig:
    """Read RoPE as `rope_config` does, where ``scaling`` is the RoPE object of these layers."""
    known = {name: read.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    known |= {name: value for name, value in scaling.items() if value is not None}
    original = read.get("original_max_position_embeddings")
    inner = ConfigReader(known if original is None else known | {"original_max_position_embeddings": original})
    rope = _layer_rope(inner, max_position, head_dim, partial)
    sections = inner.get("mrope_section", ())
    numbers = isinstance(sections, list | tuple) and all(type(size) is int and size >= 0 for size in sections)
    inner.require(numbers and len(sections) in (0, 3), "mrope_section", "must be three integers >= 0")
    interleaved = inner.flag("mrope_interleaved", False)
    return dataclasses.replace(rope, sections=tuple(sections), interleaved_sections=interleaved)


def _layer_rope(inner: ConfigReader, max_position: int, head_dim: int | None, partial: bool) -> RopeConfig:
    kind = inner.text("rope_type", inner.text("type", "default"))
    inner.require(kind in ROPE_KINDS, "rope_type", f"is not supported (known: {', '.join(ROPE_KINDS)})")
    part = _partial(inner, partial or kind == "proportional")
    rope = RopeConfig(theta=inner.number("rope_theta", 10000.0), kind=kind, partial=part)
    inner.require(rope.theta > 1.0, "rope_theta", "must be > 1")
    if kind == "default":
        return rope
    if kind == "proportional":
        return dataclasses.replace(rope, factor=_factor(inner, 1.0))
    if kind in ("linear", "dynamic"):
        return dataclasses.replace(rope, factor=_factor(inner, None), original_max_position=max_position)
    original_max = inner.positive("original_max_position_embeddings", max_position)
    rope = dataclasses.replace(rope, original_max_position=original_max)
    if kind == "llama3":
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        return dataclasses.replace(rope, factor=_factor(inner, None), low_freq_factor=low, high_freq_factor=high)
    rope = dataclasses.replace(rope, factor=_factor(inner, max_position / original_max))
    return _yarn(inner, rope) if kind == "yarn" else _longrope(inner, rope, head_dim)


def _partial(inner: ConfigReader, known: bool) -> float:
    share = inner.number("partial_rotary_factor", 1.0)
    inner.require(0.0 < share <= 1.0, "partial_rotary_factor", "must be > 0 and at most 1")
    inner.require(known or share == 1.0, "partial_rotary_factor", "is not supported for this architecture")
    return share


def _factor(inner: ConfigReader, default: float | None) -> float:
    factor = inner.number("factor") if default is None else inner.number("factor", default)
    inner.require(factor > 0.0, "factor", "must be > 0")
    return factor


def _yarn(inner: ConfigReader, rope: RopeConfig) -> RopeConfig:
    fast, slow = inner.number("beta_fast", 32.0) or 32.0, inner.number("beta_slow", 1.0) or 1.0
    inner.require(fast > 0.0, "beta_fast", "must be > 0")
    inner.require(slow > 0.0, "beta_slow", "must be > 0")
    mscale, all_dim = inner.number("mscale", 0.0), inner.number("mscale_all_dim", 0.0)
    factor = yarn_mscale(rope.factor)
    if mscale and all_dim:
        factor = yarn_mscale(rope.factor, mscale) / yarn_mscale(rope.factor, all_dim)
    return dataclasses.replace(
        rope,
        attention_factor=inner.number("attention_factor", factor),
        beta_fast=fast,
        beta_slow=slow,
        truncate=inner.flag("truncate", True),
    )


def _longrope(inner: ConfigReader, rope: RopeConfig, head_dim: int | None) -> RopeConfig:
    short, long = (_factors(inner, name) for name in ("short_factor", "long_factor"))
    count = len(short) if head_dim is None else -(-int(head_dim * rope.partial) // 2)
    for name, factors in (("short_factor", short), ("long_factor", long)):
        inner.require(len(factors) == count, name, f"must have {count} numbers")
    stretch = math.log(max(rope.factor, 1.0)) / math.log(max(rope.original_max_position, 2))
    attention_factor = inner.number("attention_factor", math.sqrt(1.0 + stretch))
    return dataclasses.replace(rope, short_factor=short, long_factor=long, attention_factor=attention_factor)


def _factors(inner: ConfigReader, name: str) -> tuple[float, ...]:
    values = inner.fields.get(name)
    numbers = isinstance(values, list) and all(type(value) in (int, float) and value > 0 for value in values)
    inner.require(numbers and bool(values), name, "must be a list of numbers > 0")
    return tuple(float(value) for value in values or ())
