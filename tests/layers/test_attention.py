"""Contiguous attention and rotary embeddings against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.layers.attention import Attention, causal_attend
from jaxinfer.layers.rope import RopeConfig, rope_angles, rotate
from jaxinfer.types import LayerSpec


def attention64(q, k, v, scale, window, ends=None):
    """Compute softmax attention one head at a time, as the papers define it. ``ends``: last key of each query."""
    time, heads, _ = q.shape
    out = np.zeros_like(q)
    for head in range(heads):
        own = head // (heads // k.shape[1])
        for i in range(time):
            first = 0 if window is None else max(0, i - window + 1)
            after = i + 1 if ends is None else ends[i] + 1
            scores = k[first:after, own] @ q[i, head] * scale
            weights = np.exp(scores - scores.max())
            out[i, head] = (weights / weights.sum()) @ v[first:after, own]
    return out


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_causal_attend_is_the_equation(heads, kv_heads, window):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((9, n, 5)) for n in (heads, kv_heads, kv_heads))
    got, cache = causal_attend(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), None, LayerSpec(window), 0.7)
    np.testing.assert_allclose(got, attention64(q, k, v, 0.7, window), atol=2e-6)
    for kept, given in zip(cache, (k, v), strict=True):
        np.testing.assert_array_equal(kept, given.astype(np.float32))


@pytest.mark.parametrize("window", [None, 2, 5])
def test_tokens_of_an_image_see_one_another_and_text_sees_what_is_before_it(window):
    """A window bounds what an image's token sees before it, and not what it sees after it."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((11, n, 5)) for n in (4, 2, 2))
    ends = np.array([0, 4, 4, 4, 4, 5, 8, 8, 8, 9, 10])
    given = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    got, _ = causal_attend(*given, None, LayerSpec(window), 0.7, ends=jnp.asarray(ends))
    np.testing.assert_allclose(got, attention64(q, k, v, 0.7, window, ends), atol=2e-6)


def test_batch_dimensions_are_independent():
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.standard_normal((3, 2, 7, 4, 8)), jnp.float32) for _ in range(3))
    whole, _ = causal_attend(q, k, v, None, LayerSpec(), 0.3)
    for i in range(3):
        for j in range(2):
            one, _ = causal_attend(q[i, j], k[i, j], v[i, j], None, LayerSpec(), 0.3)
            np.testing.assert_allclose(whole[i, j], one, atol=1e-6)


def test_norms_may_be_over_all_heads_and_after_the_rotation():
    rng = np.random.default_rng(4)
    params = {name: rng.standard_normal(shape) for name, shape in (("qkv", (6, 2, 4, 8)), ("out", (32, 6)))}
    params |= {f"{name}_norm": {"scale": rng.standard_normal((heads, 8))} for name, heads in (("q", 4), ("k", 2))}
    x, inverse = rng.standard_normal((5, 6)), RopeConfig(theta=100.0).inverse_frequencies(8)
    rope = rope_angles(jnp.arange(5), inverse)
    module = Attention(4, 2, 8, LayerSpec(), qk_norm_eps=1e-3, qk_norm_whole=True, qk_l2_eps=1e-2)
    as32 = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    got, _ = module.apply({"params": as32}, jnp.asarray(x, jnp.float32), rope, causal_attend, None)

    def unit(values: np.ndarray, eps: float) -> np.ndarray:
        return values / np.sqrt((values**2).mean(-1, keepdims=True) + eps)

    qkv = np.einsum("td,dkgh->tkgh", x, params["qkv"])
    heads = {"q": qkv[:, :, :2].reshape(5, 32), "k": qkv[:, :, 2].reshape(5, 16)}
    for name, values in heads.items():
        whole = (unit(values, 1e-3) * params[f"{name}_norm"]["scale"].reshape(-1)).reshape(5, -1, 8)
        heads[name] = unit(np.asarray(rotate(jnp.asarray(whole, jnp.float32), *rope), np.float64), 1e-2)
    mixed = attention64(heads["q"], heads["k"], qkv[:, :, 3], 8**-0.5, None)
    np.testing.assert_allclose(got, mixed.reshape(5, 32) @ params["out"], atol=1e-4)


def test_rotation_depends_on_distance_alone():
    inverse = RopeConfig(theta=100.0).inverse_frequencies(8)
    rng = np.random.default_rng(2)
    a, b = (jnp.asarray(rng.standard_normal((1, 1, 8)), jnp.float32) for _ in range(2))

    def product(i: int, j: int) -> float:
        x, y = (rotate(v, *rope_angles(jnp.array([p]), inverse)) for v, p in ((a, i), (b, j)))
        return float((x * y).sum())

    assert product(3, 5) == pytest.approx(product(10, 12), abs=1e-5)
    assert product(3, 5) != pytest.approx(product(3, 6), abs=1e-3)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
    plain = RopeConfig(theta=500000.0).inverse_frequencies(128)
    scaled = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192).inverse_frequencies(128)
    wavelength = 2 * np.pi / plain
    np.testing.assert_array_equal(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-6)
    between = (wavelength >= 8192 / 4) & (wavelength <= 8192)
    assert between.any()
    assert (scaled[between] <= plain[between]).all()
    assert (scaled[between] >= plain[between] / 8).all()


def test_linear_scaling_divides_positions():
    plain, scaled = (RopeConfig(kind=kind, factor=4.0).inverse_frequencies(8) for kind in ("default", "linear"))
    np.testing.assert_allclose(scaled, plain / 4, rtol=1e-7)
