"""Scaled rotary embeddings against the equations of their papers, in float64."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.layers.rope import AxisPositions, RopeConfig, yarn_mscale
from jaxinfer.models.config import ConfigReader, rope_config

DIM = 64


def plain(theta: float = 10000.0, dim: int = DIM) -> np.ndarray:
    """Return the frequencies of Su et al. 2021: theta_i = b ** (-2 i / d), i from 0."""
    return np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])


def read(**fields) -> RopeConfig:
    return rope_config(ConfigReader(fields), 4096)


def test_yarn_interpolates_by_parts():
    """Peng et al. 2023, section 3.2, with the ramp over the index as in the published code."""
    original, factor, fast, slow = 2048, 16.0, 32.0, 1.0
    inverse = plain()
    turns = original * inverse / (2 * math.pi)  # r(i) = L / wavelength of the paper
    rope = RopeConfig(kind="yarn", factor=factor, original_max_position=original, truncate=False)
    got = rope.inverse_frequencies(DIM)
    np.testing.assert_allclose(got[turns > fast], inverse[turns > fast], rtol=1e-6)
    np.testing.assert_allclose(got[turns < slow], inverse[turns < slow] / factor, rtol=1e-6)
    # An index is linear in the logarithm of its rotations: so is the interpolated share between the two ends.
    between = (turns <= fast) & (turns >= slow)
    assert between.sum() > 5
    share = np.log(fast / turns[between]) / math.log(fast / slow)
    expected = inverse[between] * (1 - share) + inverse[between] / factor * share
    np.testing.assert_allclose(got[between], expected, rtol=1e-6)


def test_yarn_rounds_the_ends_of_its_ramp_outwards():
    rope = RopeConfig(kind="yarn", factor=4.0, original_max_position=2048)
    exact, rounded = dataclasses.replace(rope, truncate=False), rope
    assert (exact.inverse_frequencies(DIM) != rounded.inverse_frequencies(DIM)).any()
    low, high = (DIM * math.log(2048 / (turns * 2 * math.pi)) / (2 * math.log(1e4)) for turns in (32, 1))
    share = np.clip((np.arange(DIM // 2) - math.floor(low)) / (math.ceil(high) - math.floor(low)), 0, 1)
    np.testing.assert_allclose(rounded.inverse_frequencies(DIM), plain() * (1 - share + share / 4.0), rtol=1e-6)


def test_yarn_scales_scores_with_the_context():
    assert yarn_mscale(1.0) == yarn_mscale(0.5) == 1.0
    assert yarn_mscale(40.0) == pytest.approx(0.1 * math.log(40.0) + 1.0)
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 1024}
    assert read(rope_scaling=yarn).attention_factor == pytest.approx(yarn_mscale(40.0))
    assert read(rope_scaling={**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}).attention_factor == 1.0
    ratio = read(rope_scaling={**yarn, "mscale": 0.707, "mscale_all_dim": 0.5}).attention_factor
    assert ratio == pytest.approx((0.0707 * math.log(40.0) + 1.0) / (0.05 * math.log(40.0) + 1.0))
    assert read(rope_scaling={**yarn, "attention_factor": 0.75}).attention_factor == 0.75
    assert read(rope_scaling={**yarn, "factor": None}).factor == 4.0
    cos, sin = read(rope_scaling={**yarn, "attention_factor": 0.75}).angles(jnp.arange(5), DIM)
    np.testing.assert_allclose(cos**2 + sin**2, 0.75**2, rtol=1e-6)


def longrope(**changes) -> RopeConfig:
    """Return a longrope config for heads of eight: short factors from 1, long factors from 10."""
    factors = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [10, 20.0, 30.0, 40.0]}
    scaling = {"type": "longrope", **factors, **changes}
    return rope_config(ConfigReader({"rope_scaling": scaling, "original_max_position_embeddings": 64}), 4096, 8)


def test_longrope_has_a_factor_for_each_frequency():
    """Ding et al. 2024, equation 4: the frequency over its factor; attention grows by sqrt(1 + ln s / ln L)."""
    rope = longrope()
    np.testing.assert_allclose(rope.up_to(64).inverse_frequencies(8), plain(dim=8) / [1.0, 1.5, 2.0, 3.0], rtol=1e-6)
    np.testing.assert_allclose(rope.up_to(65).inverse_frequencies(8), plain(dim=8) / [10, 20, 30, 40], rtol=1e-6)
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(64) / math.log(64)))
    assert longrope(factor=4.0).attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))
    assert longrope(attention_factor=1.25).attention_factor == 1.25


@pytest.mark.parametrize(("tokens", "long"), [(64, False), (65, True)])
def test_longrope_takes_the_long_factors_for_a_whole_long_text(tokens, long):
    rope = longrope()
    expected = dataclasses.replace(rope, long=long).angles(jnp.arange(tokens), 8)
    for got, want in zip(rope.angles(jnp.arange(tokens), 8), expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_dynamic_scaling_is_none_within_the_models_context():
    rope = read(rope_scaling={"type": "dynamic", "factor": 4.0})
    np.testing.assert_array_equal(rope.inverse_frequencies(DIM), RopeConfig().inverse_frequencies(DIM))
    assert rope.up_to(4096) == dataclasses.replace(rope, kind="default")
    assert rope.up_to(4097) == rope
    for got, want in zip(rope.angles(jnp.arange(4096), DIM), RopeConfig().angles(jnp.arange(4096), DIM), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("tokens", [65, 80, 640])
def test_dynamic_scaling_has_a_base_that_grows_with_a_longer_text(tokens):
    """The base is one for the whole text, as in transformers."""
    rope = rope_config(ConfigReader({"rope_scaling": {"type": "dynamic", "factor": 4.0}}), 64, DIM)
    base = 10000.0 * (4.0 * tokens / 64 - 3.0) ** (DIM / (DIM - 2))
    angles = np.arange(tokens)[:, None] * base ** -(np.arange(0, DIM, 2) / DIM)
    cos, sin = rope.angles(jnp.arange(tokens), DIM)
    np.testing.assert_allclose(cos, np.cos(angles), atol=2e-4)
    np.testing.assert_allclose(sin, np.sin(angles), atol=2e-4)


@pytest.mark.parametrize(("head_dim", "share", "frequencies"), [(64, 0.25, 8), (20, 0.25, 3), (96, 0.5, 24)])
def test_a_share_of_a_head_is_rotated(head_dim, share, frequencies):
    rope = rope_config(ConfigReader({"partial_rotary_factor": share}), 4096, head_dim, partial=True)
    exponents = np.arange(0, int(head_dim * share), 2) / int(head_dim * share)
    np.testing.assert_allclose(rope.inverse_frequencies(head_dim), 10000.0**-exponents, rtol=1e-6)
    assert len(rope.inverse_frequencies(head_dim)) == frequencies


@pytest.mark.parametrize(("share", "turning"), [(0.25, 8), (1.0, 32), (0.3, 9)])
def test_proportional_turns_the_first_pairs_of_a_whole_head(share: float, turning: int):
    """Frequencies are those of the whole head; the other pairs are not rotated."""
    rope = read(rope_parameters={"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": share})
    got = rope.inverse_frequencies(DIM)
    np.testing.assert_allclose(got, np.where(np.arange(32) < turning, plain(1e6), 0.0), rtol=1e-6)
    halved = dataclasses.replace(rope, factor=2.0).inverse_frequencies(DIM)
    np.testing.assert_allclose(halved, got / 2.0, rtol=1e-6)


def test_the_original_context_may_stand_beside_the_scaling():
    yarn = {"rope_type": "yarn", "factor": 2.0}
    assert read(rope_scaling=yarn).original_max_position == 4096
    assert read(rope_scaling={**yarn, "original_max_position_embeddings": 512}).original_max_position == 512
    both = read(rope_scaling={**yarn, "original_max_position_embeddings": 512}, original_max_position_embeddings=256)
    assert both.original_max_position == 256


@pytest.mark.parametrize(
    ("interleaved", "axis"),
    [(False, [0, 0, 1, 1, 1, 2, 2, 2]), (True, [0, 1, 2, 0, 1, 2, 0, 1])],
)
def test_each_frequency_turns_with_the_position_on_its_own_axis(interleaved: bool, axis: list[int]):
    """Wang et al. 2024, section 2.1 (contiguous); Qwen3-VL's technical report, section 2 (interleaved)."""
    rope = RopeConfig(sections=(2, 3, 2 if interleaved else 3), interleaved_sections=interleaved)
    axes = np.array([[5, 9], [70, 3], [11, 800]])
    cos, sin = rope.angles(AxisPositions(jnp.arange(2), jnp.asarray(axes)), 16)
    angles = axes[axis].T * plain(dim=16)
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-4)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_text_has_the_same_angles_with_and_without_axes(interleaved: bool):
    at = jnp.asarray([0, 3, 17])
    rope = RopeConfig(sections=(2, 3, 3), interleaved_sections=interleaved)
    with_axes = rope.angles(AxisPositions(at, jnp.broadcast_to(at, (3, 3))), 16)
    for got, expected in zip(with_axes, rope.angles(at, 16), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_sections_of_another_head_are_refused_by_name():
    axes = AxisPositions(jnp.arange(2), jnp.zeros((3, 2), jnp.int32))
    with pytest.raises(ValueError, match="mrope_section"):
        RopeConfig(sections=(16, 24, 24)).angles(axes, 16)
