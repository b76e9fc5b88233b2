"""Multi-head latent attention against its equations with expanded keys and values of every head."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.layers.attention import causal_attend
from jaxinfer.layers.mla import LATENT_NORM_EPS, LatentAttention
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.types import LayerSpec

HEADS, NOPE, ROPE, RANK, VALUE, D, Q_RANK, TIME = 3, 5, 4, 7, 6, 11, 8, 9
SCALE = 0.3


def parameters(q_rank: int | None, bias: bool) -> dict:
    rng = np.random.default_rng(0)
    shapes = {
        "down": (D, (q_rank or 0) + RANK + ROPE),
        "q": (q_rank or D, HEADS, NOPE + ROPE),
        "up_key": (HEADS, NOPE, RANK),
        "up_value": (HEADS, RANK, VALUE),
        "out": (HEADS * VALUE, D),
        "kv_norm": (RANK,),
    }
    shapes |= {"q_norm": (q_rank,)} if q_rank else {}
    shapes |= {"down_bias": (shapes["down"][1],), "out_bias": (D,)} if bias else {}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def normal(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + LATENT_NORM_EPS) * scale


def turned(x: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotate [time, numbers] as complex numbers."""
    angles = np.arange(TIME)[:, None] / 100.0 ** (np.arange(ROPE // 2) * 2 / ROPE)
    first, second = (x[:, 0::2], x[:, 1::2]) if interleaved else np.split(x, 2, axis=-1)
    both = (first + 1j * second) * np.exp(1j * angles)
    return np.concatenate([both.real, both.imag], axis=-1)


def expanded(x: np.ndarray, p: dict, q_rank: int | None, interleaved: bool) -> np.ndarray:
    """Compute equations 37 to 47 of the paper, one head at a time, in float64."""
    down = x @ p["down"] + p.get("down_bias", 0.0)
    wanted, latent, key = np.split(down, [q_rank or 0, (q_rank or 0) + RANK], axis=-1)
    latent, source = normal(latent, p["kv_norm"]), normal(wanted, p["q_norm"]) if q_rank else x
    mixed = []
    for head in range(HEADS):
        q = source @ p["q"][:, head]
        q = np.concatenate([q[:, :NOPE], turned(q[:, NOPE:], interleaved)], axis=-1)
        k = np.concatenate([latent @ p["up_key"][head].T, turned(key, interleaved)], axis=-1)
        scores = np.where(np.tri(TIME, dtype=bool), q @ k.T * SCALE, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed.append(weights / weights.sum(-1, keepdims=True) @ (latent @ p["up_value"][head]))
    return np.concatenate(mixed, axis=-1) @ p["out"] + p.get("out_bias", 0.0)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("q_rank", "bias"), [(None, False), (Q_RANK, True)])
def test_the_absorbed_form_is_the_equation(q_rank, bias, interleaved):
    p = parameters(q_rank, bias)
    layer = LatentAttention(
        HEADS, NOPE, ROPE, LayerSpec(latent_rank=RANK), SCALE, q_rank, bias=bias, interleaved=interleaved
    )
    x = np.random.default_rng(1).standard_normal((2, TIME, D))
    arrays = {name: jnp.asarray(value, jnp.float32) for name, value in p.items()}
    params = {name: {"scale": array} if name.endswith("_norm") else array for name, array in arrays.items()}
    positions = jnp.broadcast_to(jnp.arange(TIME), (2, TIME))
    angles = RopeConfig(theta=100.0).angles(positions, ROPE)
    got, _ = layer.apply({"params": params}, jnp.asarray(x, jnp.float32), angles, causal_attend, None)
    want = np.stack([expanded(row, p, q_rank, interleaved) for row in x])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
