"""A model as a value: what it declares, and what of that stays when a part of it is replaced."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.models.llama import LlamaBlock
from jaxinfer.models.model import Model, abstract
from jaxinfer.types import LayerSpec, ParamSpec
from jaxinfer.weights import init_params
from tests.fakes import llama_json, random_model


def by_hand() -> Model:
    described = abstract(llama_json(), "float32")
    return Model(described.module, init_params(described.specs, 0), described.config, described.family)


def test_a_model_made_by_hand_declares_what_its_family_does() -> None:
    model = by_hand()
    assert model.specs == model.family.param_specs(model.config)
    assert model.cache_spec == model.family.cache_spec(model.config)


def test_specs_and_parameters_change_together() -> None:
    model = random_model()
    one = model.map_weights(lambda tree: {name: node for name, node in tree.items() if name == "layers_1"})
    assert one.specs.keys() == one.params.keys() == {"layers_1"}
    assert one.cache_spec is model.cache_spec


def test_what_was_given_beside_the_familys_own_stays_under_another_config() -> None:
    """A longer context declares the same parameters and the same cache."""
    model = random_model().with_cache("int8")
    renamed = jax.tree.map(functools.partial(dataclasses.replace, sources=()), model.specs)
    longer = dataclasses.replace(model.config, max_position=512)
    changed = model.replace(specs=renamed).replace(config=longer)
    assert (changed.specs, changed.cache_spec) == (renamed, model.cache_spec)


def test_another_config_declares_its_own() -> None:
    model = random_model().with_cache("int8")
    windows = dataclasses.replace(model.config, layers=(LayerSpec(window=8),) * 3)
    changed = model.replace(config=windows)
    assert changed.cache_spec == model.family.cache_spec(windows) != model.cache_spec
    assert changed.specs.keys() == model.specs.keys() | {"layers_2"}
    assert model.replace(config=windows, specs=model.specs).specs is model.specs


def test_another_family_declares_its_own() -> None:
    model = random_model()
    family = dataclasses.replace(model.family, param_specs=lambda config: {"table": ParamSpec((2,), (None,))})
    changed = model.replace(family=family)
    assert (changed.specs, changed.cache_spec) == (family.param_specs(None), model.cache_spec)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_described_parameters_have_the_dtype_of_their_spec_or_the_models(dtype: str) -> None:
    model = abstract(llama_json(), dtype)
    specs = {"own": ParamSpec((3,), (None,), dtype="int8"), "rest": ParamSpec((2, 2), (None, None))}
    assert model.with_specs(specs, dtype).params == {
        "own": jax.ShapeDtypeStruct((3,), jnp.int8),
        "rest": jax.ShapeDtypeStruct((2, 2), jnp.dtype(dtype)),
    }


def test_a_model_with_another_config_is_served() -> None:
    """Windows: the engine's cache has those of the config that it is given."""
    model = by_hand()
    config = dataclasses.replace(model.config, layers=(LayerSpec(window=8), LayerSpec()))
    edited = model.replace(config=config, module=model.module.clone(config=config))
    require_served(edited)


class GainedBlock(LlamaBlock):
    """A layer with a parameter that no family declares."""

    def feed_forward(self, x: jax.Array) -> jax.Array:
        return self.weight("gain") * super().feed_forward(x)


def test_a_parameter_that_no_family_declares_is_served_with_a_spec_of_its_own() -> None:
    model = by_hand()
    module = model.module.clone(overrides=((1, GainedBlock),))

    def beside(tree: Any, gain: Any) -> Any:
        return {**tree, "layers_1": {**tree["layers_1"], "gain": gain}}

    specs = beside(model.specs, ParamSpec((32,), ("embed",)))
    params = beside(model.params, jnp.linspace(0.0, 9.0, 32))
    require_served(model.replace(params=params, specs=specs, module=module))


def require_served(model: Model) -> None:
    """The logprob that the engine serves is that of `Model.apply`."""
    llm = LLM(model, max_num_seqs=2, num_pages=16, page_size=16, prefill_sizes=(16,), compilation_cache_dir="")
    prompt = list(range(1, 40))
    found = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, logprobs=0))[0].outputs[0]
    token = found.token_ids[0]
    expected = jax.nn.log_softmax(model.apply(model.params, jnp.array(prompt))[-1])[token]
    assert found.logprobs is not None
    assert abs(found.logprobs[0][token].logprob - float(expected)) < 1e-5
