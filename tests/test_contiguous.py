"""Attention over rows at any positions matches float64; recurrences match those of the row alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.layers.attention import causal_attend
from jaxinfer.layers.recurrent import short_conv
from jaxinfer.research import KV, Contiguous, new_cache, new_states, positions_of
from jaxinfer.types import CacheSpec, LayerSpec, StateSpec

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 8, 0.3
MASK = np.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1, 0]], bool)


def operands(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng, slots = np.random.default_rng(seed), MASK.shape
    return tuple(rng.normal(size=(*slots, heads, DIM)) for heads in (HEADS, KV_HEADS, KV_HEADS))  # type: ignore[return-value]


def expected_row(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, layer: LayerSpec, sinks: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Evaluate attention one query of one head at a time: results [time, heads, dim], weights [heads, time, time]."""
    time = len(q)
    mixed, weights = np.zeros(q.shape), np.zeros((HEADS, time, time))
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        for at in range(time):
            first = 0 if layer.window is None else max(0, at - layer.window + 1)
            scores = SCALE * k[first : at + 1, group] @ q[at, head]
            scores = scores if layer.softcap is None else layer.softcap * np.tanh(scores / layer.softcap)
            sink = 0.0 if sinks is None else np.exp(sinks[head])
            weights[head, at, first : at + 1] = np.exp(scores) / (np.exp(scores).sum() + sink)
            mixed[at, head] = weights[head, at] @ v[:, group]
    return mixed, weights


LAYERS = [LayerSpec(), LayerSpec(window=2), LayerSpec(softcap=0.7), LayerSpec(window=3, softcap=0.7)]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("sinks", [None, np.array([-1.0, 0.0, 0.5, 2.0])])
def test_each_row_has_what_the_equation_says_of_its_tokens_alone(layer: LayerSpec, sinks: np.ndarray | None) -> None:
    q, k, v = operands()
    positions = positions_of(jnp.asarray(MASK))
    attend = Contiguous(positions, positions, told=[])
    given = None if sinks is None else jnp.asarray(sinks, jnp.float32)
    mixed, _ = attend(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), None, layer, SCALE, given)
    (told,) = attend.told or []
    for row, live in enumerate(MASK):
        want, weights = expected_row(q[row, live], k[row, live], v[row, live], layer, sinks)
        np.testing.assert_allclose(mixed[row][live], want, atol=1e-5)
        np.testing.assert_allclose(np.asarray(told[row])[:, live][:, :, live], weights, atol=1e-6)
        np.testing.assert_array_equal(np.asarray(told[row])[:, ~live], 0.0)
        np.testing.assert_array_equal(np.asarray(told[row])[:, :, ~live], 0.0)
    assert bool(jnp.isfinite(mixed).all())


def test_without_padding_it_is_causal_attend() -> None:
    q, k, v = (jnp.asarray(x, jnp.float32) for x in operands())
    positions = positions_of(jnp.ones(MASK.shape, bool))
    for layer in LAYERS:
        found, _ = Contiguous(positions, positions)(q, k, v, None, layer, SCALE)
        np.testing.assert_array_equal(found, causal_attend(q, k, v, None, layer, SCALE)[0])


def test_free_slots_are_not_seen() -> None:
    """The contents of free cache slots do not affect attention."""
    q, k, v = (jnp.asarray(x, jnp.float32) for x in operands())
    positions = positions_of(jnp.asarray(MASK))
    cache = new_cache(CacheSpec((LayerSpec(),), KV_HEADS, DIM), 3, 12, jnp.float32)
    dirty = KV(*(jnp.full_like(x, 1e6) for x in cache.layers[0][:2]))
    keys = cache.positions.at[:, 2:9].set(positions)
    found, kept = Contiguous(positions, keys, jnp.asarray(2))(q, k, v, dirty, LayerSpec(), SCALE)
    expected, _ = Contiguous(positions, positions)(q, k, v, None, LayerSpec(), SCALE)
    np.testing.assert_allclose(found[MASK], expected[MASK], atol=1e-6)
    np.testing.assert_array_equal(kept.k[:, 2:9], k)
    assert bool((kept.k[:, 9:] == 1e6).all())


def test_positions_count_the_tokens_before() -> None:
    assert positions_of(jnp.asarray(MASK)).tolist() == [
        [-1, -1, 0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, -1, -1, 2, 3, -1],
    ]
    assert positions_of(jnp.asarray(MASK[2:]), jnp.asarray([[5]])).tolist() == [[5, 6, -1, -1, 7, 8, -1]]


def test_a_recurrence_runs_over_tokens_and_keeps_the_state_behind_the_last() -> None:
    channels, taps = 3, 3
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(*MASK.shape, channels)), rng.normal(size=(channels, taps))
    positions, spec = (
        positions_of(jnp.asarray(MASK)),
        LayerSpec(attends=False, states=(StateSpec((channels, taps - 1)),)),
    )
    (state,) = new_states(spec, 3, jnp.float32).states
    function = short_conv(jnp.asarray(weight, jnp.float32))
    out, after = Contiguous(positions, positions).recur(function, jnp.asarray(x, jnp.float32), state)
    for row, live in enumerate(MASK):
        before = np.concatenate([np.zeros((taps - 1, channels)), x[row, live]])
        want = sum(before[tap : tap + live.sum()] * weight[:, tap] for tap in range(taps))
        np.testing.assert_allclose(out[row][live], want, atol=1e-6)
        np.testing.assert_allclose(after[row], before[-(taps - 1) :].T, atol=1e-6)
    out, after = jax.jit(Contiguous(positions[:, :1], positions).recur, static_argnums=0)(function, out[:, :1], after)
    np.testing.assert_allclose(after[0], x[0, -2:].T, atol=1e-6)  # padding leaves the state unchanged


def test_states_are_of_the_models_dtype_or_exact() -> None:
    spec = LayerSpec(states=(StateSpec((2, 3)), StateSpec((4,), exact=True)))
    cache = new_cache(CacheSpec((spec, LayerSpec(attends=False)), KV_HEADS, DIM), 2, 5, jnp.bfloat16)
    assert [(x.shape, x.dtype) for x in cache.layers[0].states] == [((2, 2, 3), jnp.bfloat16), ((2, 4), jnp.float32)]
    assert cache.layers[0].pages.k.shape == (2, 5, KV_HEADS, DIM)
    assert cache.layers[1] is None
