"""Attention within segments: the formula in float64, blocks of queries, and rows of padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.vision import layers
from jaxinfer.models.vision.layers import PADDING, replicated, within
from jaxinfer.types import LayerSpec, ParamSpec

HEADS, DIM, SCALE = 2, 8, 0.3


@pytest.fixture(params=["cpu", "gpu"], autouse=True)
def formula(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute with the formula of either platform, on this one."""
    monkeypatch.setattr(layers, "_on_cpu", lambda: request.param == "cpu")


def blocks_of(monkeypatch: pytest.MonkeyPatch, rows: int, whole: int) -> None:
    """Compute blocks of ``rows`` queries where there are more than ``whole``."""
    monkeypatch.setattr(layers, "_WHOLE", whole)
    monkeypatch.setattr(layers, "_WHOLE_CPU", whole)
    monkeypatch.setattr(layers, "_BLOCK", rows)


def operands(rows: int, seed: int) -> list[jax.Array]:
    draw = np.random.default_rng(seed)
    return [jnp.asarray(draw.normal(size=(rows, HEADS, DIM)), jnp.float32) for _ in range(3)]


def segments_of(*lengths: int, padding: int = 0) -> jax.Array:
    return jnp.asarray([*np.repeat(np.arange(len(lengths)), lengths), *[PADDING] * padding], jnp.int32)


def attended(given: list[jax.Array], segments: jax.Array, reach: int | None = None) -> np.ndarray:
    q, k, v = given
    return np.asarray(within(segments, reach)(q, k, v, None, LayerSpec(), SCALE)[0])


def reference(given: list[jax.Array], segments: jax.Array) -> np.ndarray:
    """Return softmax(q k / scale) v, segment by segment, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in given)
    out = np.zeros_like(q)
    for segment in np.unique(segments):
        rows = np.flatnonzero(segments == segment)
        scores = np.einsum("qhd,khd->hqk", q[rows], k[rows]) * SCALE
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[rows] = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v[rows])
    return out


def test_rows_attend_to_their_segment(seed: int) -> None:
    given, segments = operands(17, seed), segments_of(5, 1, 7, padding=4)
    np.testing.assert_allclose(attended(given, segments), reference(given, segments), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("reach", [None, 9])
def test_blocks_of_queries_give_the_same(seed: int, reach: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks_of(monkeypatch, 8, 16)
    given, segments, own = operands(43, seed), segments_of(9, 2, 9, 3, 9, 6, padding=5), 38
    got = attended(given, segments, reach)
    np.testing.assert_allclose(got[:own], reference(given, segments)[:own], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("reach", [None, 9])
@pytest.mark.parametrize("whole", [64, 16])
def test_padding_changes_no_bits(seed: int, whole: int, reach: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks_of(monkeypatch, 8, whole)
    given, segments, own = operands(40, seed), segments_of(9, 9, 9, padding=13), 27
    other = [x.at[own:].set(1e3) for x in given]
    assert np.array_equal(attended(given, segments, reach)[:own], attended(other, segments, reach)[:own])
    assert np.isfinite(attended(other, segments, reach)).all()


@pytest.mark.parametrize("reach", [None, 9])
@pytest.mark.parametrize("whole", [64, 16])
def test_gradients_are_those_of_the_formula(
    seed: int, whole: int, reach: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks_of(monkeypatch, 8, whole)
    given, segments, own = operands(40, seed), segments_of(9, 9, 9, padding=13), 27
    weights = jnp.asarray(np.random.default_rng(seed + 1).normal(size=(own, HEADS, DIM)), jnp.float32)

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        seen = segments[:, None] == segments
        scores = jnp.where(seen, jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * SCALE, -jnp.inf)
        out = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v, precision="highest")
        return (out[:own] * weights).sum()

    def ours(*qkv: jax.Array) -> jax.Array:
        return (within(segments, reach)(*qkv, None, LayerSpec(), SCALE)[0][:own] * weights).sum()

    for got, want in zip(*(jax.grad(each, (0, 1, 2))(*given) for each in (ours, plain)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_parameters_are_replicated() -> None:
    tree = replicated({"a": {"b": ParamSpec((2, 3), ("mlp", "embed"), init="ones")}})
    assert tree["a"]["b"] == ParamSpec((2, 3), (None, None), init="ones")
