"""Models as values: what they declare, and what remains when a field is replaced."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.layers.attention import causal_attend
from jaxinfer.models.families.llama import Llama, LlamaBlock
from jaxinfer.models.model import Model, abstract, require_ids
from jaxinfer.types import LayerSpec, ParamSpec
from jaxinfer.weights import init_params
from tests.fakes import llama_json, random_model

TOKENS = jnp.arange(3, 12)[None]


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
    changed = model.replace(config=windows, params={})
    assert changed.cache_spec == model.family.cache_spec(windows) != model.cache_spec
    assert changed.specs.keys() == model.specs.keys() | {"layers_2"}
    assert model.replace(config=windows, specs=model.specs).specs is model.specs


def test_another_family_declares_its_own() -> None:
    model = random_model()
    family = dataclasses.replace(model.family, param_specs=lambda config: {"table": ParamSpec((2,), (None,))})
    changed = model.replace(family=family, params={})
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
    """The engine's cache uses the windows of the new config."""
    model = by_hand()
    config = dataclasses.replace(model.config, layers=(LayerSpec(window=8), LayerSpec()))
    edited = model.replace(config=config)
    assert not bool((edited(TOKENS) == model(TOKENS)).all())
    require_served(edited)


def test_another_config_is_the_modules_too() -> None:
    """The module equals that of a checkpoint with this config, and block overrides are kept."""
    model = by_hand()
    rope = dataclasses.replace(model.config.rope, theta=77.0)
    edited = model.replace(config=dataclasses.replace(model.config, rope=rope))
    described = abstract(llama_json(rope_theta=77.0), "float32")
    assert (edited.module, edited.config) == (described.module, described.config)
    assert bool((edited(TOKENS) == described.apply(model.params, TOKENS)).all())
    gained = model.replace(module=model.module.clone(overrides=((1, GainedBlock),)))
    assert gained.replace(config=edited.config).module.overrides == ((1, GainedBlock),)


def test_another_familys_module_is_its_own() -> None:
    model = by_hand()
    family = dataclasses.replace(model.family, module=OtherLlama)
    assert type(model.replace(family=family).module) is OtherLlama
    assert type(model.replace(family=family, module=model.module).module) is type(model.module)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": 64}, r"embed.table is \(97, 32\) and would be \(97, 64\): pass params=..., too"),
        ({"layers": (LayerSpec(),) * 3}, r"layers_2.attention_norm.scale is absent and would be \(32,\)"),
        ({"tied": True}, r"head.table is \(97, 32\) and would be absent"),
    ],
)
def test_a_config_under_which_the_parameters_would_be_others_is_refused(changes: dict[str, Any], sentence: str) -> None:
    model = by_hand()
    with pytest.raises(ValueError, match=sentence):
        model.replace(config=dataclasses.replace(model.config, **changes))


def test_a_module_without_a_config_takes_none() -> None:
    model = by_hand().replace(module=nn.Dense(3))
    with pytest.raises(ValueError, match=r"config: the module Dense has none: pass module=..., too"):
        model.replace(config=dataclasses.replace(model.config, norm_eps=0.1))


def test_a_model_shows_itself_in_a_line() -> None:
    model = random_model(num_hidden_layers=5)
    assert repr(model) == "<Model random: Llama, 45K parameters, float32, 5 layers, 1 device>"
    assert repr(model.apply) == f"<bound method Model.apply of {model!r}>"
    assert "layers=5 * (LayerSpec(),)" in repr(model.config)
    assert repr(abstract(llama_json(), "bfloat16")) == "<Model: Llama, 21.7K parameters, bfloat16, 2 layers>"
    assert repr(model.replace(params={})) == "<Model random: Llama, 5 layers>"
    shown = []
    jax.eval_shape(lambda traced: shown.append(repr(traced)), model)
    assert shown == ["<Model random: Llama, 45K parameters, float32, 5 layers>"]


def test_a_model_is_an_argument_of_jax_functions() -> None:
    model = by_hand()

    def loss(model: Model) -> jax.Array:
        return jax.nn.log_softmax(model(TOKENS))[..., 3].mean()

    grads = jax.jit(jax.grad(loss))(model)
    expected = jax.grad(lambda params: loss(model.replace(params=params)))(model.params)
    assert isinstance(grads, Model)
    assert jax.tree.structure(grads) == jax.tree.structure(model)
    near = jax.tree.map(lambda a, b: bool(jnp.allclose(a, b, atol=1e-6)), grads.params, expected)
    assert all(jax.tree.leaves(near))
    halved = jax.tree.map(lambda x: x / 2, model)
    assert (halved.config, halved.specs) == (model.config, model.specs)
    assert hash(halved) == hash(model) != hash(model.replace(name="another"))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(model)]
    assert paths[0] == ".params['embed']['table']"


def test_a_function_of_models_is_compiled_once_for_all_that_differ_in_parameters_alone() -> None:
    model, traced = by_hand(), []

    @jax.jit
    def logits(model: Model) -> jax.Array:
        traced.append(model.config)
        return model(TOKENS)

    first, halved = logits(model), logits(jax.tree.map(lambda x: x / 2, model))
    assert len(traced) == 1
    assert not bool((first == halved).all())
    logits(model.replace(config=dataclasses.replace(model.config, norm_eps=0.5)))
    assert [config.norm_eps for config in traced] == [model.config.norm_eps, 0.5]


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        ([1, 2], r"tokens is a list: pass an array of token ids, jnp.array\(...\)"),
        (jnp.ones(3), "tokens are float32: pass an array of token ids"),
    ],
)
def test_what_is_no_array_of_ids_is_refused(tokens: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        require_ids(tokens)


def test_arrays_on_explicit_axes_are_refused() -> None:
    """`jax.make_mesh` makes such axes by default."""
    model, mesh = by_hand(), jax.make_mesh((1,), ("mine",))
    everywhere = jax.NamedSharding(mesh, jax.P())
    with pytest.raises(TypeError, match=r"tokens lies on a mesh with Explicit axes \('mine',\): .*AxisType.Auto"):
        model(jax.device_put(TOKENS, everywhere))
    with pytest.raises(TypeError, match="params lies on a mesh"):
        jax.jit(model.apply)(jax.device_put(model.params, everywhere), TOKENS)
    auto = jax.make_mesh((1,), ("mine",), axis_types=(jax.sharding.AxisType.Auto,))
    assert model(jax.device_put(TOKENS, jax.NamedSharding(auto, jax.P()))).shape == (1, 9, 97)


class OtherLlama(Llama):
    """A module of another type, for another family."""


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
    """Check that the served logprob is that of `Model.apply`."""
    llm = LLM(model, max_num_seqs=2, num_pages=16, page_size=16, prefill_sizes=(16,), compilation_cache_dir="")
    prompt = list(range(1, 40))
    found = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, logprobs=0))[0].outputs[0]
    token = found.token_ids[0]
    expected = jax.nn.log_softmax(model.apply(model.params, jnp.array(prompt))[-1])[token]
    assert found.logprobs is not None
    assert abs(found.logprobs[0][token].logprob - float(expected)) < 1e-5


class TellingBlock(LlamaBlock):
    """A layer that sows its output, and adds a direction that is an attribute."""

    direction: Any = None
    labels: Any = ()

    def feed_forward(self, x: jax.Array) -> jax.Array:
        out = super().feed_forward(x) + (0.0 if self.direction is None else self.direction)
        self.sow("intermediates", "added", out)
        return out


def overridden(model: Model, overrides: Any) -> Model:
    return model.replace(module=model.module.clone(overrides=overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        ((2, TellingBlock),),
        ((-3, TellingBlock),),
        ((77, TellingBlock),),
        (("1", TellingBlock),),
        ((1.0, TellingBlock),),
        ((True, TellingBlock),),
        ((None, TellingBlock),),
        ((0, "TellingBlock"),),
        ((1, TellingBlock), (-1, LlamaBlock)),
        ((1,),),
        (1, TellingBlock),
        5,
    ],
    ids=str,
)
def test_overrides_of_what_is_no_layer_are_refused(overrides: Any) -> None:
    with pytest.raises(ValueError, match="overrides"):
        overridden(random_model(), overrides)


def test_the_last_layer_has_two_numbers() -> None:
    model = random_model()
    steered = functools.partial(TellingBlock, direction=jnp.arange(32.0))
    named, last = (overridden(model, ((index, steered),)) for index in (1, -1))
    assert (named.module.overrides, named(TOKENS).shape) == (last.module.overrides, (1, 9, 97))
    assert jnp.array_equal(named(TOKENS), last(TOKENS))
    assert not jnp.array_equal(named(TOKENS), model(TOKENS))
    assert overridden(model, {np.int64(-1): steered}).module.overrides == last.module.overrides


@pytest.mark.parametrize("jit", [False, True])
def test_what_blocks_sow_comes_out_layer_by_layer(jit: bool) -> None:
    model = overridden(random_model(), ((0, TellingBlock), (1, TellingBlock)))
    positions = jnp.arange(9)[None]

    def run(params: Any) -> Any:
        operands = {"params": params}, TOKENS, positions, causal_attend, None
        return model.module.apply(*operands, mutable=["intermediates"])

    (hidden, _), sown = jax.jit(run)(model.params) if jit else run(model.params)
    added = [sown["intermediates"][f"layers_{index}"]["added"][0] for index in range(2)]
    assert [each.shape for each in added] == [(1, 9, 32)] * 2
    assert not jnp.array_equal(*added)
    assert jnp.allclose(hidden, model.hidden(model.params, TOKENS), atol=1e-5)
    assert sown.keys() == {"intermediates"}


def test_arrays_may_be_attributes_of_blocks() -> None:
    """Arrays compare by identity: two layers with different directions are two functions."""
    model, up = random_model(), 3.0 * jnp.arange(32.0)

    def block(direction: Any) -> Any:
        return functools.partial(TellingBlock, direction=direction, labels=["a", {"b": np.arange(2)}])

    both = overridden(model, ((0, block(up)), (1, block(-up))))
    twice = overridden(model, ((0, block(up)), (1, block(up))))
    assert not jnp.allclose(both(TOKENS), twice(TOKENS))
    assert jnp.allclose(jax.jit(lambda model: model(TOKENS))(both), both(TOKENS), atol=1e-4)
    require_served(both)
