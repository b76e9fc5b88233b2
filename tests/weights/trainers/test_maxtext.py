"""MaxText's names, against the tensors that MaxText's own converter makes (tools/oracle/trainers.py)."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

from jaxinfer.models.model import abstract
from jaxinfer.weights import WeightsError, named_parameters, params_from
from tests.weights.trainers.models import assert_equal, random_model
from tools.oracle.trainers import config_json, values

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "goldens" / "trainers"
RECORDS = json.loads((GOLDENS / "maxtext.json").read_text())
# Its converter divides Gemma 3's embeddings by sqrt(d) as bfloat16 rounds it.
ROOM = {"gemma3": 2e-4}


def weights_of(case: str) -> dict[str, np.ndarray]:
    return {name: values(name, tuple(shape)) for name, shape in RECORDS[case]["shapes"].items()}


def nested(weights: dict[str, Any]) -> dict[str, Any]:
    """Return weights as MaxText's trees have them: {"params": {"decoder": {"layers": ...}}}."""
    tree: dict[str, Any] = {}
    for name, value in weights.items():
        *path, last = name.split("-")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


@pytest.mark.parametrize("case", RECORDS)
def test_tensors_are_those_of_its_converter(case: str):
    model = abstract(RECORDS[case]["config"], "float32")
    model = model.replace(params=params_from(model, nested(weights_of(case))))
    found = dict(named_parameters(model))
    with np.load(GOLDENS / "maxtext.npz") as goldens:
        expected = {name.partition("/")[2]: goldens[name] for name in goldens if name.startswith(f"{case}/")}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=ROOM.get(case.partition("-")[0], 2e-7), atol=1e-7, err_msg=name
        )


@pytest.mark.parametrize("case", RECORDS)
def test_pairs_are_read_as_the_tree_is(case: str):
    model, weights = abstract(RECORDS[case]["config"], "float32"), weights_of(case)
    assert_equal(params_from(model, iter(weights.items())), params_from(model, nested(weights), names="maxtext"))


def test_gemma_1():
    """Its converter reads a Flax checkpoint, so that its layout is written down here."""
    model = random_model(config_json("gemma", num_key_value_heads=1))
    tensors = dict(named_parameters(model))
    layers = range(model.config.layers.__len__())

    def stacked(name: str, *shape: int) -> np.ndarray:
        return np.stack([tensors[f"model.layers.{layer}.{name}.weight"].T.reshape(shape) for layer in layers], axis=1)

    weights = {
        "token_embedder": {"embedding": tensors["model.embed_tokens.weight"] * np.float32(8**0.5)},
        "decoder": {
            "decoder_norm": {"scale": tensors["model.norm.weight"] + 1},
            "layers": {
                "self_attention": {
                    "query": {"kernel": stacked("self_attn.q_proj", 8, 4, 4) / 2},
                    "key": {"kernel": stacked("self_attn.k_proj", 8, 1, 4)},
                    "value": {"kernel": stacked("self_attn.v_proj", 8, 1, 4)},
                    "out": {"kernel": stacked("self_attn.o_proj", 4, 4, 8)},
                },
                "mlp": {
                    "wi_0": {"kernel": stacked("mlp.gate_proj", 8, 12)},
                    "wi_1": {"kernel": stacked("mlp.up_proj", 8, 12)},
                    "wo": {"kernel": stacked("mlp.down_proj", 12, 8)},
                },
                "pre_self_attention_norm": {"scale": stacked("input_layernorm", 8) + 1},
                "pre_ffw_norm": {"scale": stacked("post_attention_layernorm", 8) + 1},
            },
        },
    }
    found = dict(named_parameters(model.replace(params=params_from(model, {"params": weights}))))
    for name, value in tensors.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=2e-7, err_msg=name)


def test_a_missing_array_has_the_name_of_maxtext():
    weights = weights_of("qwen3-scanned")
    del weights["params-decoder-layers-mlp-wo-kernel"]
    with pytest.raises(WeightsError) as error:
        params_from(abstract(RECORDS["qwen3-scanned"]["config"], "float32"), weights)
    assert (error.value.name, error.value.expected) == ("decoder.layers.mlp.wo.kernel", (12, 2, 8))


def test_a_vocabulary_that_is_too_small_is_refused():
    weights = weights_of("qwen3-apart")
    name = "params-token_embedder-embedding"
    weights[name] = weights[name][:15]
    with pytest.raises(WeightsError) as error:
        params_from(abstract(RECORDS["qwen3-apart"]["config"], "float32"), weights)
    assert (error.value.name, error.value.given) == (name, (15, 8))
