"""Checkpoints quantised by third-party tools: float32 logits against transformers'."""

import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.loading import load_model
from jaxinfer.models.model import Model
from jaxinfer.quant import with_activations

QUICK = ("bnb-nf4-nodq", "ct-fp8-static", "fp8-block128-weight_scale_inv", "gptq-g64-sym-descact", "mxfp4-gpt-oss")
SLOW = (
    "awq-gemm-g128",
    "bnb-fp4-dq",
    "bnb-int8",
    "bnb-nf4-dq",
    "ct-fp8-dynamic",
    "ct-mxfp4a16",
    "ct-nvfp4a16",
    "ct-w4a16-g128",
    "ct-w8a8-smoothquant",
    "gptq-3bit-g128-asym",
    "gptq-8bit-g128-sym",
    "gptq-g128-sym",
    "gptq-g64-asym-v2",
)
TOLERANCE = 1e-4


def cases(quick: Iterable[str], slow: Iterable[str]) -> list[Any]:
    return [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


def loaded(test_data: pathlib.Path, name: str) -> tuple[Model, dict[str, np.ndarray]]:
    folder = test_data / "models" / "quantised" / name
    with np.load(folder / "expected.npz") as expected:
        arrays = {key: expected[key] for key in expected.files if key.startswith(("logits", "input"))}
    return load_model(str(folder), dtype="float32"), arrays


def logits(model: Model, params: Any, expected: dict[str, np.ndarray]) -> np.ndarray:
    return np.asarray(model.apply(params, jnp.asarray(expected["input_ids"])))


@pytest.mark.parametrize("name", cases(QUICK, SLOW))
def test_logits_of_weights_alone(test_data: pathlib.Path, name: str) -> None:
    model, expected = loaded(test_data, name)
    found = logits(model, with_activations(model.params, "none"), expected)
    np.testing.assert_allclose(found, expected["logits_dequant_f32"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", cases(["ct-fp8-static"], ["ct-fp8-dynamic"]))
def test_logits_of_activations_in_float8(test_data: pathlib.Path, name: str) -> None:
    model, expected = loaded(test_data, name)
    found = logits(model, model.params, expected)
    np.testing.assert_allclose(found, expected["logits_actquant_f32"], rtol=0, atol=TOLERANCE)


def test_logits_of_activations_in_int8(test_data: pathlib.Path) -> None:
    """A token's largest magnitude is divided by 1/127.5 of itself: the result is 127.5 or the next smaller float,
    depending on its last bit, and rounds to -128 or -127. transformers' own logits change by 0.3 if embeddings change
    by a relative 1e-7. So such changes are tried: nearly every position matches its expected logits under one of them;
    the remaining one differs by one such value."""
    model, expected = loaded(test_data, "ct-w8a8-smoothquant")
    run = jax.jit(lambda params: model.apply(params, jnp.asarray(expected["input_ids"])))
    table = model.params["embed"]["table"]
    distances = []
    for seed in range(60):
        noise = np.random.default_rng(seed).standard_normal(table.shape) * 1e-7
        found = run({**model.params, "embed": {"table": (table * (1 + noise)).astype(table.dtype)}})
        distances.append(abs(np.asarray(found) - expected["logits_actquant_f32"]).max(axis=-1))
    nearest = np.min(distances, axis=0)
    assert (nearest <= TOLERANCE).sum() >= len(nearest) - 1, nearest
    assert (nearest <= 0.05).all(), nearest
