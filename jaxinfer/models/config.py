"""Reading config.json: every field is checked, and an error names the field and its value."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Mapping
from typing import Any

from jaxinfer.layers.rope import RopeConfig, yarn_mscale


class ConfigError(ValueError):
    """A config.json that cannot be served. The message names the field and the value."""


_REQUIRED = object()

# A parameter tree of more would take minutes and gigabytes to make, before any checkpoint contradicts it.
_MOST_LAYERS = _MOST_EXPERTS = 1024
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), _MOST_LAYERS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _MOST_EXPERTS),
}
_SHORT = reprlib.Repr(maxstring=120, maxother=120, maxlist=20, maxdict=20, maxlevel=3)


def shown(value: object) -> str:
    """Format a value for a message, cut where it is long."""
    return _SHORT.repr(value)


@dataclasses.dataclass(frozen=True)
class ConfigReader:
    """Typed access to the fields of config.json. A field that is absent or null takes its default."""

    fields: Mapping[str, Any]

    def _get(self, name: str, default: Any) -> Any:
        value = self.fields.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ConfigError(f"config.json: {name} is missing")
            return default
        return value

    def positive(self, name: str, default: Any = _REQUIRED) -> int:
        value = self._get(name, default)
        self.require(isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31, name, "must be > 0")
        most = _MOST.get(name, value)
        self.require(value <= most, name, f"must be at most {most}")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        value = self._get(name, default)
        real = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        self.require(real, name, "must be a finite number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        self.require(isinstance(value, bool), name, "must be true or false")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        value = self._get(name, default)
        self.require(isinstance(value, str), name, "must be a string")
        return value

    def choice(self, name: str, default: str, known: tuple[str, ...]) -> str:
        value = self.text(name, default)
        self.require(value in known, name, f"is not supported (known: {', '.join(known)})")
        return value

    def require(self, condition: bool, name: str, what: str) -> None:
        if not condition:
            raise ConfigError(f"config.json: {name} = {shown(self.fields.get(name))} {what}")


def renamed(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Rename fields of ``config`` that have two names: ``names`` maps one to the other, which the family reads."""
    return {names.get(name, name): value for name, value in config.items()}


# The defaults of `transformers` where config.json leaves these out; null means no window.
_SLIDING_WINDOW = 4096
_MAX_WINDOW_LAYERS = 28


def layer_windows(read: ConfigReader, model_type: str) -> list[int | None]:
    """The sliding window of each layer in tokens, None for full attention."""
    count = read.positive("num_hidden_layers")
    sliding = model_type == "mistral" or (model_type in ("qwen2", "qwen3") and read.flag("use_sliding_window", False))
    if not sliding or read.fields.get("sliding_window", _SLIDING_WINDOW) is None:
        return [None] * count
    window = read.positive("sliding_window", _SLIDING_WINDOW)
    return [window] * count if model_type == "mistral" else _windows_by_layer(read, window, count)


def _windows_by_layer(read: ConfigReader, window: int, count: int) -> list[int | None]:
    """The windows of Qwen's layers: of those in ``layer_types``, or of all after ``max_window_layers``."""
    kinds = read.fields.get("layer_types")
    if kinds is None:
        first = read.fields.get("max_window_layers", _MAX_WINDOW_LAYERS)
        read.require(isinstance(first, int) and first >= 0, "max_window_layers", "must be >= 0")
        return [window if index >= first else None for index in range(count)]
    known = isinstance(kinds, list) and set(kinds) <= {"full_attention", "sliding_attention"}
    read.require(known and len(kinds) == count, "layer_types", f"must name {count} full or sliding attentions")
    return [window if kind == "sliding_attention" else None for kind in kinds]


ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def rope_config(
    read: ConfigReader, max_position: int, head_dim: int | None = None, partial: bool = False
) -> RopeConfig:
    """RoPE from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old).

    Args:
        max_position: of the model, what a factor or an original context is taken from where it is left out.
        head_dim: longrope's lists must have a factor for each frequency of such heads (None: unchecked).
        partial: whether the family knows heads that are rotated in part (``partial_rotary_factor``).
    """
    for name in ("rope_parameters", "rope_scaling"):
        value = read.fields.get(name)
        read.require(value is None or isinstance(value, dict), name, "must be an object")
    scaling: dict[str, Any] = read.fields.get("rope_scaling") or read.fields.get("rope_parameters") or {}
    return layer_rope(read, scaling, max_position, head_dim, partial)


def layer_rope(
    read: ConfigReader,
    scaling: Mapping[str, Any],
    max_position: int,
    head_dim: int | None = None,
    partial: bool = False,
) -> RopeConfig:
    """`rope_config` where ``scaling`` is what config.json says of these layers alone."""
    known = {name: read.fields.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    known |= {name: value for name, value in scaling.items() if value is not None}
    original = read.fields.get("original_max_position_embeddings")
    inner = ConfigReader(known if original is None else known | {"original_max_position_embeddings": original})
    kind = inner.text("rope_type", inner.text("type", "default"))
    inner.require(kind in ROPE_KINDS, "rope_type", f"is not supported (known: {', '.join(ROPE_KINDS)})")
    rope = RopeConfig(theta=inner.number("rope_theta", 10000.0), kind=kind, partial=_partial(inner, partial))
    inner.require(rope.theta > 1.0, "rope_theta", "must be > 1")
    if kind == "default":
        return rope
    if kind in ("linear", "dynamic"):
        return dataclasses.replace(rope, factor=_factor(inner, None))
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
