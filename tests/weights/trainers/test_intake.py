"""Weights in Hugging Face's and the model's own names: round trips of every family, and what is refused."""

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.compilations import count_compilations
from jaxinfer.models.model import Model, abstract
from jaxinfer.quant.layouts import Grouped
from jaxinfer.weights import WeightsError, each_param, named_parameters, params_from
from jaxinfer.weights.trainers import fuse, outlet
from tests.fakes import llama_json
from tests.models.test_families import ROWS
from tests.quant.models import stored_and_plain
from tests.weights.trainers.models import assert_equal, by_path, random_model

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "goldens" / "models"


def config_of(case: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((GOLDENS / case / "config.json").read_text())
    return config


@pytest.fixture(scope="module")
def llama() -> Model:
    return random_model(llama_json())


@pytest.fixture(scope="module")
def tensors(llama: Model) -> dict[str, Any]:
    return dict(named_parameters(llama))


def test_names_and_shapes_are_those_of_transformers():
    case = json.loads((GOLDENS / "llama-tiny-hub" / "case.json").read_text())
    model = random_model(config_of("llama-tiny-hub"))
    found = {name: list(value.shape) for name, value in named_parameters(model)}
    assert found == {name: list(shape) for name, shape in case["shapes"].items()}


@pytest.mark.parametrize("kind", ROWS)
def test_every_family_goes_to_hugging_face_and_back(kind: str):
    model = random_model(config_of(ROWS[kind]), "bfloat16")
    pairs = list(named_parameters(model))
    assert_equal(params_from(model, dict(pairs)), model.params)
    assert_equal(params_from(model, iter(reversed(pairs)), names="hf"), model.params)


def in_list(params: Any) -> Any:
    return [(".".join(key.key for key in path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]


@pytest.mark.parametrize("form", [lambda m: m.params, lambda m: m, lambda m: in_list(m.params)])
def test_own_names_are_not_copied(llama: Model, form: Callable[[Model], Any]):
    made = params_from(llama, form(llama))
    assert_equal(made, llama.params)
    assert all(jax.tree.leaves(jax.tree.map(lambda one, other: one is other, made, llama.params)))


def test_a_matrix_in_the_order_of_the_model_is_not_copied(llama: Model, tensors: dict[str, Any]):
    assert params_from(llama, tensors)["embed"]["table"] is tensors["model.embed_tokens.weight"]


def test_jax_arrays_are_read_like_numpy_arrays(llama: Model, tensors: dict[str, Any]):
    assert_equal(params_from(llama, {name: jnp.asarray(value) for name, value in tensors.items()}), llama.params)


def test_arrays_on_devices_are_fused_there(llama: Model, tensors: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    for module in (fuse, outlet):
        monkeypatch.setattr(module, "is_host", lambda array: False)
    arrays = {name: jnp.asarray(value) for name, value in tensors.items()}
    fuse._on_devices.clear_cache()
    with count_compilations() as compiled:
        made = params_from(llama, arrays)
    assert_equal(made, llama.params)
    assert isinstance(made["layers_0"]["attention"]["qkv"], jax.Array)
    assert compiled.count == 4  # one for each matrix that is fused or turned, whichever its layer
    with count_compilations() as again:
        params_from(llama, arrays)
    assert again.count == 0
    back = dict(named_parameters(llama))
    assert all(isinstance(value, jax.Array) for value in back.values())
    assert_equal(back, tensors)


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: {other: value for other, value in given.items() if other != name}


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: {**given, name: change(given.get(name, given["model.norm.weight"]))}


KEY = "model.layers.1.self_attn.k_proj.weight"
WRONG = {
    "missing": (without(KEY), KEY, [16, 32], None),
    "unknown": (changed("model.layers.1.extra", lambda a: a), "model.layers.1.extra", None, [32]),
    "shape": (changed(KEY, np.transpose), KEY, [16, 32], [32, 16]),
    "dtype": (changed(KEY, lambda a: a.astype(np.float16)), KEY, "float32", "float16"),
    "integers": (changed(KEY, lambda a: a.astype(np.int32)), KEY, "float32", "int32"),
}


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("case", WRONG)
def test_the_first_array_that_does_not_fit_is_named(llama: Model, tensors: dict[str, Any], case: str, streamed: bool):
    change, name, expected, given = WRONG[case]
    weights: Any = change(tensors)
    with pytest.raises(WeightsError) as error:
        params_from(llama, iter(weights.items()) if streamed else weights)
    found = (error.value.name, plain(error.value.expected), plain(error.value.given))
    assert found == (name, expected, given)
    assert name in str(error.value)


def test_a_tree_is_checked_before_anything_is_made(llama: Model, tensors: dict[str, Any]):
    with pytest.raises(WeightsError):
        next(each_param(llama, without("lm_head.weight")(tensors)))


def test_pairs_are_read_one_at_a_time(llama: Model, tensors: dict[str, Any]):
    read: list[str] = []

    def pairs() -> Iterator[tuple[str, Any]]:
        for name, value in tensors.items():
            read.append(name)
            yield name, value

    first = next(each_param(llama, pairs(), names="hf"))
    assert first[0] == ("embed", "table")
    assert read == ["model.embed_tokens.weight"]


def test_a_name_that_is_given_twice_is_refused(llama: Model, tensors: dict[str, Any]):
    with pytest.raises(WeightsError) as error:
        params_from(llama, [*tensors.items(), ("model.norm.weight", tensors["model.norm.weight"])])
    assert error.value.name == "model.norm.weight"


def test_a_deleted_array_is_named(llama: Model, tensors: dict[str, Any]):
    gone = jnp.array(tensors[KEY])
    gone.delete()
    with pytest.raises(WeightsError) as error:
        params_from(llama, {**tensors, KEY: gone})
    assert error.value.name == KEY


def test_what_is_no_array_is_refused(llama: Model, tensors: dict[str, Any]):
    with pytest.raises(TypeError, match=r"model\.norm\.weight"):
        params_from(llama, list({**tensors, "model.norm.weight": 3.0}.items()))


def test_unknown_names_of_a_convention_are_refused(llama: Model, tensors: dict[str, Any]):
    with pytest.raises(WeightsError) as error:
        params_from(llama, tensors, names="torch")
    assert error.value.name == "names"


def test_names_of_another_convention_are_refused(llama: Model, tensors: dict[str, Any]):
    with pytest.raises(WeightsError) as error:
        params_from(llama, tensors, names="tunix")
    assert error.value.name == "model.embed_tokens.weight"


@pytest.mark.parametrize("names", ["tunix", "maxtext", "levanter"])
def test_trainers_have_no_names_for_other_families(names: str):
    model = random_model(config_of(ROWS["gpt2"]))
    with pytest.raises(WeightsError) as error:
        params_from(model, dict(named_parameters(model)), names=names)
    assert error.value.name == "names"


def test_partial_weights(llama: Model, tensors: dict[str, Any]):
    some = {name: value for name, value in tensors.items() if ".1.mlp." in name or name == "model.norm.weight"}
    made = params_from(llama, some, partial=True)
    assert made.keys() == {"layers_1", "final_norm"}
    assert_equal(made["layers_1"]["mlp"], llama.params["layers_1"]["mlp"])
    with pytest.raises(WeightsError) as error:
        params_from(llama, without("model.layers.1.mlp.up_proj.weight")(some), partial=True)
    assert error.value.name == "model.layers.1.mlp.up_proj.weight"


def test_cast_rounds_to_the_dtype_of_the_model(llama: Model, tensors: dict[str, Any]):
    model = abstract(llama_json(), "bfloat16")
    expected = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), llama.params)
    assert_equal(params_from(model, tensors, cast=True), expected)


def test_a_head_of_a_tied_model_must_be_its_table():
    model = random_model(llama_json(tie_word_embeddings=True))
    tensors = dict(named_parameters(model))
    table = tensors["model.embed_tokens.weight"]
    assert_equal(params_from(model, {**tensors, "lm_head.weight": table.copy()}), model.params)
    for order in (1, -1):
        with pytest.raises(WeightsError) as error:
            params_from(model, [*{**tensors, "lm_head.weight": table + 1}.items()][::order])
        assert error.value.name == "lm_head.weight"


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_names_within_a_wrapper(llama: Model, tensors: dict[str, Any], prefix: str):
    head = f"{prefix.removesuffix('model.')}lm_head." if prefix.startswith("language") else "lm_head."
    spelt = {
        name.replace("lm_head.", head).replace("model.", prefix, "lm_head" not in name): a
        for name, a in tensors.items()
    }
    assert_equal(params_from(llama, spelt), llama.params)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_stacked_experts(turned: bool, streamed: bool):
    model = random_model(config_of(ROWS["qwen3_moe"]))
    tensors = {name: value for name, value in named_parameters(model) if ".experts." not in name}
    for layer in (name for name in model.params if name.startswith("layers_")):
        mlp = by_path(model.params, (layer, "mlp"))
        if "router" not in mlp:
            continue
        at = f"model.layers.{layer.removeprefix('layers_')}.mlp.experts"
        both = np.asarray(mlp["gate_up"]).reshape(len(mlp["gate_up"]), -1, mlp["gate_up"].shape[-1])
        for name, value in (("gate_up_proj", both), ("down_proj", np.asarray(mlp["down"]))):
            tensors[f"{at}.{name}"] = value.swapaxes(1, 2) if turned else value
    assert any(".experts." in name for name in tensors)
    assert_equal(params_from(model, iter(tensors.items()) if streamed else tensors), model.params)


def test_a_model_with_another_layout_takes_plain_weights(llama: Model, tensors: dict[str, Any]):
    copied = llama.replace(params=jax.tree.map(jnp.array, llama.params))
    turned = copied.laid_out("in first")
    assert jax.tree.structure(turned.params) != jax.tree.structure(llama.params)
    assert_equal(params_from(turned, tensors), llama.params)
    assert_equal(params_from(turned, llama.params), llama.params)


def test_a_quantised_model_takes_plain_weights_and_its_own(llama: Model, tmp_path: pathlib.Path):
    stored, plain = stored_and_plain(
        llama, tmp_path, lambda name, inputs: Grouped("int8", inputs) if ".mlp." in name else None
    )
    assert_equal(params_from(stored, dict(named_parameters(plain))), plain.params)
    made = params_from(stored, stored)
    assert made["layers_0"]["mlp"]["down"]["codes"] is stored.params["layers_0"]["mlp"]["down"].arrays["codes"]
    with pytest.raises(ValueError, match="layers_0/mlp/gate_up"):
        dict(named_parameters(stored))


def test_tensors_that_loading_passes_over_are_passed_over(llama: Model, tensors: dict[str, Any]):
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    assert_equal(params_from(llama, {**tensors, **more}), llama.params)
