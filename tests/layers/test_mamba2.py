"""Mamba-2 against its equations in float64, with time-step limits, which the decode steps of no oracle apply."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.layers.attention import causal_attend
from jaxinfer.layers.mamba2 import Mamba2, MambaSizes
from jaxinfer.types import LayerSpec

SIZES = MambaSizes(heads=4, head_dim=3, groups=2, state=5, taps=3, bias=True, out_bias=True)
D, TIME, EPS = 6, 70, 1e-5


def params(sizes: MambaSizes) -> dict[str, np.ndarray]:
    rng, heads, groups = np.random.default_rng(0), (sizes.heads, sizes.head_dim), (2 * sizes.groups, sizes.state)
    shapes: dict[str, tuple[int, ...]] = {
        "zx": (D, sizes.heads, 2 * sizes.head_dim),
        "bc": (D, *groups),
        "dt": (D, sizes.heads),
        "conv_x": (*heads, sizes.taps),
        "conv_bc": (*groups, sizes.taps),
        "out": (sizes.inner, D),
        "norm": heads,
    }
    shapes |= {f"{name}_bias": shapes[name][1:] for name in ("zx", "bc", "out")}
    shapes |= {"dt_in_bias": (sizes.heads,), "conv_x_bias": heads, "conv_bc_bias": groups}
    shapes |= dict.fromkeys(("log_decay", "dt_bias", "skip"), (sizes.heads,))
    return {name: 0.5 * rng.normal(size=shape) for name, shape in shapes.items()}


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))


def convolved(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    padded = np.concatenate([np.zeros((weight.shape[-1] - 1, *x.shape[1:])), x])
    return silu(sum(padded[tap : tap + len(x)] * weight[..., tap] for tap in range(weight.shape[-1])) + bias)


def expected(x: np.ndarray, p: dict[str, np.ndarray], sizes: MambaSizes) -> np.ndarray:
    """Compute the layer token by token in float64."""
    z, values = np.split(np.einsum("td,dhn->thn", x, p["zx"]) + p["zx_bias"], 2, axis=-1)
    z = z * sizes.multipliers[0]
    values = convolved(values * sizes.multipliers[1], p["conv_x"], p["conv_x_bias"])
    by = np.repeat(sizes.multipliers[2:4], sizes.groups)[:, None]
    bc = convolved((np.einsum("td,dgn->tgn", x, p["bc"]) + p["bc_bias"]) * by, p["conv_bc"], p["conv_bc_bias"])
    b, c = (np.repeat(part, sizes.heads // sizes.groups, axis=1) for part in np.split(bc, 2, axis=1))
    steps = np.log1p(np.exp((x @ p["dt"] + p["dt_in_bias"]) * sizes.multipliers[4] + p["dt_bias"]))
    steps = np.clip(steps, *sizes.limits)
    state, outs = np.zeros((sizes.heads, sizes.head_dim, sizes.state)), []
    for now, value in enumerate(values):
        kept = np.exp(-np.exp(p["log_decay"]) * steps[now])[:, None, None]
        state = kept * state + (steps[now][:, None] * value)[..., None] * b[now][:, None]
        outs.append((state * c[now][:, None]).sum(-1) + p["skip"][:, None] * value)
    gated = normed(np.array(outs), silu(z), p["norm"], sizes).reshape(len(x), -1)
    return gated @ p["out"] + p["out_bias"]


def normed(x: np.ndarray, gate: np.ndarray, scale: np.ndarray, sizes: MambaSizes) -> np.ndarray:
    if sizes.norm is None:
        return x * gate
    before = sizes.norm == "before gate"
    x = x if before else x * gate
    grouped = x.reshape(len(x), sizes.groups, -1)
    normal = grouped / np.sqrt((grouped**2).mean(-1, keepdims=True) + EPS)
    return normal.reshape(x.shape) * scale * (gate if before else 1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"limits": (0.4, 0.9)},
        {"norm": None},
        {"norm": "before gate"},
        {"multipliers": (0.5, 0.6, 0.7, 0.8, 0.9)},
    ],
    ids=str,
)
def test_outputs_are_those_of_the_equations(changes: dict[str, Any]) -> None:
    sizes = dataclasses.replace(SIZES, **changes)
    given, x = params(sizes), np.random.default_rng(1).normal(size=(TIME, D))
    layer: Any = Mamba2(sizes, LayerSpec(attends=False, states=sizes.states), EPS)
    narrow = {name: jnp.asarray(value, jnp.float32) for name, value in given.items()}
    out, cache = layer.apply({"params": narrow}, jnp.asarray(x, jnp.float32), causal_attend, None)
    assert cache is None
    np.testing.assert_allclose(out, expected(x, given, sizes), atol=2e-4)
