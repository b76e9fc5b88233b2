"""Merging adapters into weights: rejected cases, and the unchanged tree of the base model."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import load_model
from jaxinfer.lora.adapter import Adapter
from jaxinfer.lora.errors import AdapterError
from jaxinfer.lora.merge import merge_lora, model_base
from jaxinfer.models.model import Model
from jaxinfer.quantize import Recipe
from jaxinfer.quantize.driver import quantize
from tests.lora.goldens import GOLDENS, golden, load_base, read
from tests.models.parity import tokenizer_json
from tools.oracle.adapters_golden import write_base


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_base(golden("llama-qv"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def adapter(model: Model) -> Adapter:
    return read(GOLDENS / "llama-qv", model)


def test_the_models_own_parameters_stay(model: Model, adapter: Adapter):
    before = jax.tree.map(np.asarray, model.params)
    merged = merge_lora(model, adapter)
    assert jax.tree.all(jax.tree.map(lambda old, new: bool((old == new).all()), before, model.params))
    changed = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, old), new in zip(
            jax.tree.leaves_with_path(model.params), jax.tree.leaves(merged.params), strict=True
        )
        if (old != new).any()
    }
    assert changed == {"layers_0/attention/qkv", "layers_1/attention/qkv"}


def test_the_sum_is_rounded_once(model: Model, adapter: Adapter):
    half = model.replace(params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params))
    path = ("layers_0", "attention", "qkv")
    delta, weight = adapter.deltas[path], half.params[path[0]][path[1]][path[2]]
    exact = np.asarray(weight, np.float64) + np.einsum("kgdr,ri->ikgd", delta.b.astype(np.float64), delta.a)
    got = merge_lora(half, adapter).params[path[0]][path[1]][path[2]]
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2.0**-8)


def test_a_bias_where_the_model_has_none_is_refused(model: Model, adapter: Adapter):
    path = ("layers_0", "attention", "qkv")
    delta = dataclasses.replace(adapter.deltas[path], bias=np.zeros((2, 4, 8), np.float32))
    with pytest.raises(ValueError, match="layers_0/attention/qkv_bias, which the model does not have"):
        merge_lora(model, dataclasses.replace(adapter, deltas={path: delta}))


def test_adapters_of_other_models_are_refused(model: Model, adapter: Adapter):
    path = ("layers_7", "attention", "qkv")
    other = dataclasses.replace(adapter, deltas={path: next(iter(adapter.deltas.values()))})
    with pytest.raises(ValueError, match="no parameter layers_7/attention/qkv"):
        merge_lora(model, other)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return the same model in int8."""
    folder = tmp_path_factory.mktemp("int8")
    quantize(str(write_base(golden("llama-qv"), folder / "plain")), folder / "int8", Recipe("int8"))
    (folder / "int8" / "tokenizer.json").write_text(json.dumps(tokenizer_json(64)))
    return load_model(str(folder / "int8"), dtype="float32", show_progress=False)


def test_stored_weights_are_quantised_again(stored: Model, adapter: Adapter):
    errors: dict[tuple[str, ...], float] = {}
    merged = merge_lora(stored, adapter, errors.__setitem__)
    assert set(errors) == set(adapter.deltas)
    assert len(errors) == 2
    for path, delta in adapter.deltas.items():
        before, after = (model.params[path[0]][path[1]][path[2]] for model in (stored, merged))
        assert jax.tree.structure(after) == jax.tree.structure(before)
        exact = np.asarray(before.dequantize(), np.float64) + np.einsum("kgdr,ri->kgdi", delta.b, delta.a)
        lost = np.asarray(after.dequantize(), np.float64) - exact
        assert (np.abs(lost) <= 0.501 * np.asarray(after.arrays["scales"])).all()
        assert errors[path] == pytest.approx(np.linalg.norm(lost) / np.linalg.norm(exact), rel=1e-3)
        assert 0 < errors[path] < 0.01


def test_a_layout_that_is_not_rounded_to_is_refused_with_its_weight(stored: Model, adapter: Adapter):
    """As blocks of GGUF are, which another program makes."""
    params = {name: dict(node) for name, node in stored.params.items()}
    qkv = params["layers_0"]["attention"]["qkv"]
    changed = dataclasses.replace(qkv, layout=dataclasses.replace(qkv.layout, factor=0.5))
    params["layers_0"]["attention"] = {**params["layers_0"]["attention"], "qkv": changed}
    with pytest.raises(ValueError, match="layers_0/attention/qkv cannot be quantised again: Grouped"):
        merge_lora(stored.replace(params=params), adapter)


def test_folded_weights_are_refused(stored: Model, adapter: Adapter):
    with pytest.raises(ValueError, match="scaled"):
        merge_lora(stored.replace(folded=True), adapter)


def test_the_models_own_weights_are_dequantised(stored: Model, model: Model):
    dequantised, plain = model_base(stored), model_base(model)
    for path in (("layers_0", "attention", "qkv"), ("layers_0", "mlp", "gate_up"), ("layers_0", "mlp", "down")):
        own = plain(path)
        assert dequantised(path).shape == own.shape
        assert 0 < np.abs(dequantised(path) - own).max() < np.abs(own).max() / 64


def test_weights_of_several_processes_are_no_base(model: Model):
    """DoRA needs norms of whole weights: it is rejected by its key."""

    class Elsewhere:
        is_fully_addressable = False

    params = {**model.params, "layers_0": {"attention": {"qkv": Elsewhere()}}}
    base = model_base(dataclasses.replace(model, params=params))
    with pytest.raises(AdapterError, match=r"use_dora=true: .*/qkv, which lies in several processes"):
        base(("layers_0", "attention", "qkv"))
