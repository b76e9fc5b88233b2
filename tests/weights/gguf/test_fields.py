"""Rotary embeddings given by metadata: cosines and sines match llama.cpp's equations."""

import itertools
import math
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.families.llama import LlamaConfig
from jaxinfer.weights.gguf.fields import common
from jaxinfer.weights.gguf.header_view import Described
from tests.weights.files import refused
from tests.weights.gguf.files import TINY

CONTEXT, DIM = 64, 8
POSITIONS = np.arange(40)
OLD, NEW, GROWTH, ORIGINAL = (
    *("rope.scale_linear", "rope.scaling.factor"),
    *("rope.scaling.attn_factor", "rope.scaling.original_context_length"),
)


def described(factors: np.ndarray | None = None, **keys: Any) -> Described:
    metadata = TINY | {f"llama.{key}": value for key, value in keys.items()}
    shapes = {"token_embd.weight": (8, 32)} | ({} if factors is None else {"rope_freqs.weight": factors.shape})
    return Described(pathlib.Path("model.gguf"), metadata, shapes, lambda name: factors)


def angles(model: Described) -> np.ndarray:
    config = LlamaConfig.from_json({**common(model), "architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    return np.stack(config.rope.angles(jnp.asarray(POSITIONS), DIM))


def reference(keys: dict[str, Any], factors: np.ndarray | None = None) -> np.ndarray:
    """Compute `rope_yarn` of ggml with the arguments that llama.cpp derives from the metadata (hparams, cparams)."""
    kind = keys.get("rope.scaling.type", "linear")
    divisor = keys.get(NEW, keys.get(OLD, 0.0)) or 1.0
    scale = 1.0 if kind == "none" else 1.0 / divisor
    inverse = 10000.0 ** -(np.arange(0, DIM, 2) / DIM)
    plain = POSITIONS[:, None] * inverse / (1.0 if factors is None else factors)
    theta, growth = plain * scale, keys.get(GROWTH, 1.0)
    if kind == "yarn":
        original = keys.get(ORIGINAL, CONTEXT)
        ends = [DIM * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(10000.0)) for turns in (32.0, 1.0)]
        low, high = max(0, math.floor(ends[0])), min(DIM - 1, math.ceil(ends[1]))
        ramp = 1.0 - np.clip((np.arange(DIM // 2) - low) / max(0.001, high - low), 0.0, 1.0)
        theta = theta * (1 - ramp) + plain * ramp
        growth *= 1.0 + 0.1 * math.log(divisor)
    return np.stack([np.cos(theta), np.sin(theta)]) * growth


KINDS = ({}, {"rope.scaling.type": "linear"}, {"rope.scaling.type": "yarn"}, {"rope.scaling.type": "none"})
SCALES = ({}, {NEW: 4.0}, {OLD: 4.0}, {OLD: 8.0, NEW: 2.0}, {NEW: 0.0})


@pytest.mark.parametrize("growth", [{}, {GROWTH: 1.25}])
@pytest.mark.parametrize("original", [{}, {ORIGINAL: 16}])
def test_scalings_are_those_of_llama_cpp(growth: dict[str, Any], original: dict[str, Any]) -> None:
    for kind, scale in itertools.product(KINDS, SCALES):
        keys = kind | scale | growth | original
        assert np.abs(angles(described(**keys)) - reference(keys)).max() < 1e-5, keys


@pytest.mark.parametrize("keys", [{}, {NEW: 4.0}, {OLD: 2.0, GROWTH: 1.25}, {NEW: 2.0, "rope.scaling.type": "none"}])
def test_factors_of_frequencies_and_a_scaling(keys: dict[str, Any]) -> None:
    factors = np.array([1.0, 2.5, 3.0, 8.0], np.float32)
    assert np.abs(angles(described(factors, **keys)) - reference(keys, factors)).max() < 1e-5


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({NEW: -1.0}, "'-1.0' as llama.rope.scaling.factor"),
        ({OLD: "two"}, "'two' as llama.rope.scale_linear"),
        ({GROWTH: 0.0}, "'0.0' as llama.rope.scaling.attn_factor"),
        ({"rope.scaling.type": "longrope"}, "'longrope' as llama.rope.scaling.type"),
        ({"rope.scaling.type": ["yarn"]}, "as llama.rope.scaling.type"),
    ],
)
def test_scalings_that_cannot_be(keys: dict[str, Any], message: str) -> None:
    with refused(message):
        common(described(**keys))
