"""Reading config.json: every field is checked, and an error names the field and its value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxinfer.layers.rope import RopeConfig


class ConfigError(ValueError):
    """A config.json that cannot be served. The message names the field and the value."""


_REQUIRED = object()


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
            raise ConfigError(f"config.json: {name} = {self.fields.get(name)!r} {what}")


# What `transformers` takes where config.json leaves these out; null means no window.
_SLIDING_WINDOW = 4096
_MAX_WINDOW_LAYERS = 28


def layer_windows(read: ConfigReader, model_type: str) -> list[int | None]:
    """The sliding window of each layer in tokens, None for full attention."""
    count = read.positive("num_hidden_layers")
    sliding = model_type == "mistral" or (model_type in ("qwen2", "qwen3") and read.flag("use_sliding_window", False))
    if not sliding or read.fields.get("sliding_window", _SLIDING_WINDOW) is None:
        return [None] * count
    window = read.positive("sliding_window", _SLIDING_WINDOW)
    if model_type == "mistral":
        return [window] * count
    kinds = read.fields.get("layer_types")
    if kinds is None:
        first = read.fields.get("max_window_layers", _MAX_WINDOW_LAYERS)
        read.require(isinstance(first, int) and first >= 0, "max_window_layers", "must be >= 0")
        return [window if index >= first else None for index in range(count)]
    known = isinstance(kinds, list) and set(kinds) <= {"full_attention", "sliding_attention"}
    read.require(known and len(kinds) == count, "layer_types", f"must name {count} full or sliding attentions")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def rope_config(read: ConfigReader, max_position: int) -> RopeConfig:
    """RoPE from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old)."""
    for name in ("rope_parameters", "rope_scaling"):
        value = read.fields.get(name)
        read.require(value is None or isinstance(value, dict), name, "must be an object")
    scaling: dict[str, Any] = read.fields.get("rope_parameters") or read.fields.get("rope_scaling") or {}
    inner = ConfigReader(scaling)
    theta = inner.number("rope_theta", read.number("rope_theta", 10000.0))
    kind = inner.text("rope_type", inner.text("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    inner.require(kind in ("linear", "llama3"), "rope_type", "is not supported (known: default, linear, llama3)")
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=inner.number("factor"))
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=inner.number("factor"),
        low_freq_factor=inner.number("low_freq_factor"),
        high_freq_factor=inner.number("high_freq_factor"),
        original_max_position=inner.positive("original_max_position_embeddings", max_position),
    )
