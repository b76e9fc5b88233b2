"""Mamba-2 in hybrid models with attention: its sizes in config.json, and its parameters."""

from __future__ import annotations

import math
from typing import Any

from jaxinfer.layers.mamba2 import UNLIMITED, MambaSizes
from jaxinfer.layers.mlp import ACTIVATIONS
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.specs import linear, plain
from jaxinfer.types import ParamSpec, Source

DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
"""Defaults of the transformers configurations that use these field names."""


def mamba_sizes(read: ConfigReader, inner: int, **switches: Any) -> MambaSizes:
    """Read the sizes of the Mamba layers.

    Args:
        inner: total dim of all heads.
        switches: the other fields of `MambaSizes`.

    Raises:
        ConfigError: a field is missing, of the wrong type or not supported.
    """
    heads, groups = read.positive("mamba_n_heads"), read.positive("mamba_n_groups")
    size = read.get("mamba_d_head", "auto")
    head_dim = inner // heads if size == "auto" else read.positive("mamba_d_head")
    read.require(heads * head_dim == inner, "mamba_d_head", f"times {heads} heads must be {inner}")
    read.require(heads % groups == 0, "mamba_n_groups", f"must divide the {heads} heads")
    taps = read.positive("mamba_d_conv")
    read.require(taps > 1, "mamba_d_conv", "must be at least 2")
    common: dict[str, Any] = {
        "activation": read.choice("hidden_act", "silu", tuple(ACTIVATIONS)),
        "bias": read.flag("mamba_proj_bias", False),
        "conv_bias": read.flag("mamba_conv_bias", True),
        "limits": _limits(read),
    }
    return MambaSizes(heads, head_dim, groups, read.positive("mamba_d_state"), taps, **common | switches)


def _limits(read: ConfigReader) -> tuple[float, float]:
    """Read the limits of time steps, where infinity is spelt as in JSON or as by transformers."""
    limits = read.get("time_step_limit", list(UNLIMITED))
    numbers = [_number(limit) for limit in limits] if isinstance(limits, list | tuple) else []
    known = len(numbers) == 2 and 0.0 <= numbers[0] < numbers[1]
    read.require(known, "time_step_limit", "must be two numbers, the first at least 0 and less than the second")
    return numbers[0], numbers[1]


def _number(value: Any) -> float:
    value = value.get("__float__") if isinstance(value, dict) else value
    infinite = value == "Infinity"
    return math.inf if infinite else float(value) if type(value) in (int, float) else math.nan


def mamba_specs(sizes: MambaSizes, prefix: str, d: int) -> dict[str, Any]:
    """Return the parameters of `Mamba2`: rows of the projection are gates, values, B, C and time steps; channels of the
    convolution are values, B and C."""
    inner, heads, groups = sizes.inner, (sizes.heads, sizes.head_dim), (2 * sizes.groups, sizes.state)
    shared, rows = math.prod(groups), f"{prefix}.in_proj"
    whole = 2 * inner + shared + sizes.heads
    halves = tuple((index * inner, heads, _half(index, sizes.head_dim)) for index in range(2))
    zx, both = (sizes.heads, 2 * sizes.head_dim), ("heads", None)
    tree: dict[str, Any] = {
        "zx": _rows(rows, whole, d, zx, both, halves),
        "bc": _rows(rows, whole, d, groups, (None, None), ((2 * inner, groups, ()),)),
        "dt": _rows(rows, whole, d, heads[:1], both[:1], ((2 * inner + shared, heads[:1], ()),)),
        **_conv(sizes, f"{prefix}.conv1d"),
        **{name: _each(f"{prefix}.{tensor}", sizes.heads) for name, tensor in _EACH.items()},
        "out": linear(f"{prefix}.out_proj.weight", (inner, d), ("heads", "embed")),
    }
    if sizes.bias:
        tree["zx_bias"] = _rows(rows, whole, None, zx, both, halves)
        tree["bc_bias"] = _rows(rows, whole, None, groups, (None, None), ((2 * inner, groups, ()),))
        tree["dt_in_bias"] = _rows(rows, whole, None, heads[:1], both[:1], ((2 * inner + shared, heads[:1], ()),))
    if sizes.out_bias:
        tree["out_bias"] = plain(f"{prefix}.out_proj.bias", (d,), ("embed",), "zeros")
    if sizes.norm is not None:
        source = Source(f"{prefix}.norm.weight", (inner,), reshape=heads)
        tree["norm"] = ParamSpec(heads, both, init="ones", sources=(source,))
    return tree


_EACH = {"log_decay": "A_log", "dt_bias": "dt_bias", "skip": "D"}


def _each(name: str, heads: int) -> ParamSpec:
    return ParamSpec((heads,), ("heads",), init="zeros", sources=(Source(name, (heads,)),), dtype="float32")


def _half(index: int, size: int) -> tuple[slice, ...]:
    return slice(None), slice(index * size, (index + 1) * size)


def _rows(
    name: str,
    whole: int,
    d: int | None,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    parts: tuple[tuple[int, tuple[int, ...], tuple[slice, ...]], ...],
) -> ParamSpec:
    """Return rows of a projection from ``d`` inputs as a parameter, or the biases of these rows (``d`` None).

    Args:
        parts: for each, the first row, the shape of the rows in the parameter, and their index there.
    """
    lead, every = ((), ()) if d is None else ((d,), (slice(None),))
    sources = tuple(
        Source(
            f"{name}.bias" if d is None else f"{name}.weight",
            (whole, *lead),
            transpose=d is not None,
            reshape=(*lead, *form),
            where=(*every, *place) if place else (),
            part=(slice(first, first + math.prod(form)),),
        )
        for first, form, place in parts
    )
    if d is None:
        return ParamSpec(shape, axes, init="zeros", sources=sources)
    return ParamSpec((d, *shape), ("embed", *axes), sources=sources, inputs=0)


def _conv(sizes: MambaSizes, name: str) -> dict[str, Any]:
    heads, groups = (sizes.heads, sizes.head_dim), (2 * sizes.groups, sizes.state)
    whole, tree = sizes.inner + math.prod(groups), {}
    for part, first, form, axis in (("conv_x", 0, heads, "heads"), ("conv_bc", sizes.inner, groups, None)):
        rows, shape = (slice(first, first + math.prod(form)),), (*form, sizes.taps)
        source = Source(f"{name}.weight", (whole, 1, sizes.taps), reshape=shape, part=rows)
        tree[part] = ParamSpec(shape, (axis, None, None), sources=(source,))
        if sizes.conv_bias:
            source = Source(f"{name}.bias", (whole,), reshape=form, part=rows)
            tree[f"{part}_bias"] = ParamSpec(form, (axis, None), init="zeros", sources=(source,))
    return tree
