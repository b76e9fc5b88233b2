"""Edited models: those that cannot be served or saved are rejected by name; saved ones load again."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, load_model
from jaxinfer.models.edits import require_described, require_one_dtype, require_specified
from jaxinfer.models.families.llama import LlamaBlock
from jaxinfer.models.model import Model
from jaxinfer.weights import save_params
from tests.fakes import llama_json, random_model
from tests.quant.examples import INPUTS, LAYOUTS
from tests.quant.models import stored_and_plain


def with_down(model: Model, down: Any) -> Model:
    """Return the model with ``layers_1.mlp.down`` replaced; None: removed."""
    layer = model.params["layers_1"]
    mlp = {name: leaf for name, leaf in {**layer["mlp"], "down": down}.items() if leaf is not None}
    return model.replace(params={**model.params, "layers_1": {**layer, "mlp": mlp}})


@pytest.mark.parametrize(
    ("down", "sentence"),
    [
        (jnp.ones(3), r"^layers_1.mlp.down is \(3,\) and must be \(48, 32\)$"),
        (None, r"^layers_1.mlp.down is missing from params: it must be \(48, 32\)$"),
        (0.5, r"^layers_1.mlp.down is a float, and must be an array \(48, 32\)$"),
        ({"a": jnp.ones(3)}, r"^layers_1.mlp.down is missing"),
        (
            jnp.ones((48, 32), jnp.bfloat16),
            r"is bfloat16 and must be float32 as embed.table: LLM\(model, dtype='float32'",
        ),
    ],
)
def test_a_parameter_that_is_not_what_its_spec_says_is_named(down: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LLM(with_down(random_model(), down))


def test_a_parameter_without_a_spec_is_named() -> None:
    model = random_model()
    with pytest.raises(ValueError, match=r"gain has no spec: specs=... must have a ParamSpec for it"):
        require_specified(model.replace(params={**model.params, "gain": jnp.ones(3)}))


def test_float32_in_a_bfloat16_model_is_cast_when_asked_for() -> None:
    model = random_model("bfloat16")
    edited = with_down(model, np.full((48, 32), 0.1, np.float32))
    with pytest.raises(ValueError, match=r"layers_1.mlp.down is float32 and must be bfloat16"):
        LLM(edited)
    with LLM(edited, "bfloat16", max_num_seqs=1, num_pages=16, page_size=16, prefill_sizes=(16,)) as llm:
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(llm.model.params)} == {"bfloat16"}


def test_parameters_that_keep_a_dtype_of_their_own_are_as_their_spec_says() -> None:
    model = random_model("bfloat16")
    specs = {
        **model.specs,
        "final_norm": {"scale": dataclasses.replace(model.specs["final_norm"]["scale"], dtype="float32")},
    }
    with pytest.raises(ValueError, match=r"final_norm\.scale is bfloat16 and must be float32$"):
        require_one_dtype(model.replace(specs=specs))
    scale = model.params["final_norm"]["scale"].astype(jnp.float32)
    require_one_dtype(model.replace(specs=specs, params={**model.params, "final_norm": {"scale": scale}}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return the folder of a tiny Llama with the demo's tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    demo, model = load_model("demo"), random_model(vocab_size=2048)
    save_params(folder, model.params, model.specs, llama_json(vocab_size=2048))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((demo.origin.path / name).read_bytes())
    return folder


def test_a_saved_model_is_loaded_again(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    model = load_model(str(folder))
    halved = jax.tree.map(lambda x: x / 2, model)
    halved.save(tmp_path / "halved")
    again = load_model(str(tmp_path / "halved"))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), again.params, halved.params)
    assert all(jax.tree.leaves(same))
    assert again.config == model.config
    assert again.tokenizer.encode("To be") == model.tokenizer.encode("To be")


def test_a_model_saved_into_its_own_folder_keeps_its_tokenizer(folder: pathlib.Path) -> None:
    load_model(str(folder)).save(str(folder))
    assert load_model(str(folder)).tokenizer is not None


def test_another_config_is_saved_with_its_config_json(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    model = load_model(str(folder))
    rope = dataclasses.replace(model.config.rope, theta=77.0)
    edited = model.replace(config=dataclasses.replace(model.config, rope=rope))
    with pytest.raises(ValueError, match=r"rope: RopeConfig\(\) there, RopeConfig\(theta=77.0\) here"):
        edited.save(tmp_path)
    edited.save(tmp_path, {**edited.origin.config_json, "rope_theta": 77.0})
    assert json.loads((tmp_path / "config.json").read_text())["rope_theta"] == 77.0
    assert load_model(str(tmp_path)).config == edited.config


def test_an_edited_module_is_not_saved_in_silence(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    model = load_model(str(folder))
    edited = model.replace(module=model.module.clone(overrides=((1, LlamaBlock),)))
    with pytest.raises(ValueError, match="the model's module was edited, and a folder holds no code"):
        edited.save(tmp_path)
    edited.replace(module=edited.family.module(edited.config)).save(tmp_path)
    assert (tmp_path / "model.safetensors").exists()


def test_a_model_made_by_hand_says_how_it_is_saved(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"not loaded from a folder: jaxinfer.weights.save_params"):
        random_model().save(tmp_path)


def test_quantised_weights_are_what_their_specs_say_and_are_saved_by_convert(tmp_path: pathlib.Path) -> None:
    shape: dict[str, Any] = {"hidden_size": INPUTS, "intermediate_size": INPUTS}
    layout = LAYOUTS["int4 with zeros"]
    stored = stored_and_plain(random_model(**shape), tmp_path, lambda name, _: None if "embed" in name else layout)[0]
    require_specified(stored)
    require_one_dtype(stored)
    with pytest.raises(ValueError, match=r"quantised weights: python -m jaxinfer\.convert"):
        require_described(stored, llama_json(**shape))
