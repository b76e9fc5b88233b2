"""Replicated KV heads: the same function, filled from the same tensors."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import EngineConfigError
from jaxinfer.parallel.heads import (
    as_copied,
    copied,
    kv_copies,
    require_even,
    require_experts,
    with_copies,
    without_copies,
)
from jaxinfer.types import CacheSpec, LayerSpec, ParamSpec, Source, walk_specs
from jaxinfer.weights import load_params, save_params
from tests.fakes import llama_json, random_model

SHAPE: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "attention_bias": True}


def leaves(specs: Any, params: Any, copies: int) -> Any:
    is_spec = {"is_leaf": lambda x: isinstance(x, ParamSpec)}
    return jax.tree.map(lambda spec, value: copied(value, spec, copies), specs, params, **is_spec)


@pytest.mark.parametrize("copies", [2, 4])
def test_a_model_with_copies_is_the_same_function(copies):
    model = random_model(**SHAPE)
    specs = model.specs
    params = leaves(specs, model.params, copies)
    assert params["layers_0"]["attention"]["qkv"].shape == (64, 2 * copies, 4 // copies + 2, 8)
    tokens = jnp.arange(20)[None] % 97
    want = np.asarray(model.apply(model.params, tokens))
    np.testing.assert_allclose(np.asarray(model.apply(params, tokens)), want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("copies", [2, 4])
def test_copies_are_filled_from_the_checkpoint(copies, tmp_path: pathlib.Path):
    model = random_model(**SHAPE)
    specs = model.specs
    save_params(tmp_path, model.params, specs, llama_json(**SHAPE))
    loaded = load_params(tmp_path, with_copies(specs, copies), "float32")
    for got, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(leaves(specs, model.params, copies)), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_abstract_parameters_stay_abstract():
    spec = ParamSpec((2, 4 + 2, 8), ("kv_heads", "group", "head_dim"))
    shape = copied(jax.ShapeDtypeStruct((2, 6, 8), jnp.bfloat16), spec, 2)
    assert (shape.shape, shape.dtype) == ((4, 4, 8), jnp.bfloat16)


@pytest.mark.parametrize("copies", [1, 2, 4])
@pytest.mark.parametrize("axes", [("kv_heads", "group", "head_dim", None), (None, "kv_heads", "group", "head_dim")])
def test_arrays_of_the_host_are_copied_and_back(axes: tuple[str | None, ...], copies: int):
    shape = [3] * 4
    shape[axes.index("kv_heads")], shape[axes.index("group")] = 2, 4 + 2
    value, plain = np.random.default_rng(0).random(shape, np.float32), ParamSpec(tuple(shape), axes)
    ((_, spec),) = walk_specs(with_copies({"w": plain}, copies))
    spread = as_copied(value, spec)
    assert isinstance(spread, np.ndarray)
    np.testing.assert_array_equal(spread, np.asarray(copied(jnp.asarray(value), plain, copies)))
    np.testing.assert_array_equal(without_copies(spread, plain), value)
    other = ParamSpec((4,), ("mlp",))
    assert as_copied(value, other) is without_copies(value, other) is value


def test_how_many_copies():
    cache = CacheSpec((LayerSpec(),), 4, 8)
    assert [kv_copies(cache, {"tensor": tensor}) for tensor in (1, 2, 4, 8, 16)] == [1, 1, 1, 2, 4]
    latent = dataclasses.replace(cache, layers=(LayerSpec(latent_rank=4),), kv_heads=1)
    assert kv_copies(latent, {"tensor": 8}) == 1
    with pytest.raises(EngineConfigError, match="tensor_parallel_size = 3 cannot be: it neither divides the model's 4"):
        kv_copies(cache, {"tensor": 3})


def test_a_tensor_that_holds_all_heads_together_is_not_dealt_out():
    fused = Source("query_key_value.weight", (2 * 6 * 8, 16), transpose=True, reshape=(16, 2, 6, 8))
    spec = ParamSpec((16, 2, 6, 8), ("embed", "kv_heads", "group", "head_dim"), sources=(fused,))
    assert with_copies({"qkv": spec}, 1) == {"qkv": spec}
    with pytest.raises(EngineConfigError, match=r"the tensor query_key_value.weight holds queries, keys and values"):
        with_copies({"qkv": spec}, 2)


def test_what_cannot_be_dealt_out_evenly_is_named():
    tree = {"layers_3": {"up": ParamSpec((10, 4), ("mlp", "embed"))}, "head": ParamSpec((7, 4), ("vocab", "embed"))}
    require_even(tree, {"tensor": 5})
    with pytest.raises(EngineConfigError, match="size = 4 cannot be: 4 devices do not divide the 10 mlp of layers_3"):
        require_even(tree, {"tensor": 4})
    with pytest.raises(EngineConfigError, match="expert_parallel_size x tensor_parallel_size = 2 x 2 cannot be: 4 dev"):
        require_even(tree, {"tensor": 2, "expert": 2})


def test_experts_are_dealt_out_where_there_are_some():
    dense = {"layers_0": {"up": ParamSpec((10, 4), ("mlp", "embed"))}}
    experts = {**dense, "layers_1": {"up": ParamSpec((6, 10, 4), ("expert", "expert_mlp", "embed"))}}
    require_experts(experts, {"expert": 3})
    require_experts(dense, {"expert": 1, "tensor": 5})
    with pytest.raises(EngineConfigError, match="expert_parallel_size = 2 cannot be: the model has no experts"):
        require_experts(dense, {"expert": 2})
