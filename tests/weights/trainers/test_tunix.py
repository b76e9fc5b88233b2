"""Tunix' names, against logits of tunix' own models (tools/oracle/trainers.py)."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.models.model import abstract
from jaxinfer.weights import WeightsError, params_from
from tests.weights.trainers.models import assert_equal
from tools.oracle.trainers import TOKENS, TUNIX, values

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "goldens" / "trainers"
# Seven layers of Gemma 3 amplify rounding: a change of 2e-7 in its weights changes logits by 1e-3.
ROOM = {"gemma3": 1e-3}


def weights_of(case: str) -> dict[str, np.ndarray]:
    """Return the weights of a case by tunix' names."""
    shapes = json.loads((GOLDENS / "tunix.json").read_text())[case]["shapes"]
    return {name: values(name, tuple(shape)) for name, shape in shapes.items()}


def nested(weights: dict[str, Any]) -> nnx.State:
    """Return weights as the state of a module, with the layers by number."""
    paths = {
        tuple(int(key) if key.isdigit() else key for key in name.split(".")): value for name, value in weights.items()
    }
    return nnx.from_flat_state([(path, nnx.Param(jnp.asarray(value))) for path, value in paths.items()])


@pytest.mark.parametrize("case", TUNIX)
def test_logits_are_those_of_tunix(case: str):
    model = abstract(TUNIX[case], "float32")
    params = jax.tree.map(jnp.asarray, params_from(model, nested(weights_of(case))))
    with np.load(GOLDENS / "tunix.npz") as logits:
        expected = logits[case]
    error = np.abs(np.asarray(model.apply(params, jnp.asarray([TOKENS]))[0]) - expected).max()
    assert error < ROOM.get(case, 1e-5)


@pytest.mark.parametrize("case", TUNIX)
def test_pairs_are_read_as_the_state_is(case: str):
    model, weights = abstract(TUNIX[case], "float32"), weights_of(case)
    assert_equal(params_from(model, iter(weights.items()), names="tunix"), params_from(model, nested(weights)))


def test_a_missing_array_has_the_name_of_tunix():
    weights = weights_of("gemma2")
    del weights["layers.1.attn.kv_einsum.w"]
    with pytest.raises(WeightsError) as error:
        params_from(abstract(TUNIX["gemma2"], "float32"), weights)
    assert (error.value.name, error.value.expected) == ("layers.1.attn.kv_einsum.w", (2, 2, 8, 4))


def test_a_wrong_shape_is_that_of_tunix():
    weights = weights_of("llama")
    weights["layers.0.attn.q_proj.w"] = weights["layers.0.attn.q_proj.w"].reshape(8, 16)
    with pytest.raises(WeightsError) as error:
        params_from(abstract(TUNIX["llama"], "float32"), nested(weights))
    found = error.value.name, error.value.expected, error.value.given
    assert found == ("layers.0.attn.q_proj.w", (8, 4, 4), (8, 16))


def test_adapters_are_unknown():
    weights = weights_of("qwen3")
    weights["layers.0.attn.q_proj.w_lora_a"] = np.ones((8, 2), np.float32)
    with pytest.raises(WeightsError) as error:
        params_from(abstract(TUNIX["qwen3"], "float32"), weights)
    assert error.value.name == "layers.0.attn.q_proj.w_lora_a"
