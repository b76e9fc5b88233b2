"""Parameters of stored weights, for every family and storage, equal the model of the dequantised weights."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.model import Model
from jaxinfer.quant import Split, dense, is_stored
from jaxinfer.quant.layouts import Codebook, Grouped, Layout
from jaxinfer.types import walk_specs
from jaxinfer.weights import CheckpointError, open_checkpoint
from jaxinfer.weights.quantized import StoredCheckpoint, StoredWeight, storages
from tests.fakes import random_model
from tests.models.parity import load_case
from tests.models.test_families import ROWS
from tests.models.test_parity import golden
from tests.quant.examples import LAYOUTS, TABLE
from tests.quant.models import Chooses, stored_and_plain
from tests.weights.files import write_tensors


def assert_same(stored: Model, plain: Model):
    """Check that every parameter has the same values, and the function the same results."""
    for path, spec in walk_specs(plain.specs):
        own, wanted = stored.params, plain.params
        for key in path:
            own, wanted = own[key], wanted[key]
        if spec.inputs == 0 and is_stored(own):
            wanted = jnp.moveaxis(wanted, 0, -1)
        np.testing.assert_array_equal(dense(own), wanted, err_msg="/".join(path))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, plain.config.vocab_size, (2, 17)))
    expected = jax.jit(plain.apply)(plain.params, tokens)
    result = jax.jit(stored.apply)(stored.params, tokens)
    np.testing.assert_allclose(result, expected, atol=2e-5 * float(jnp.abs(expected).max()))


def groups_of(size: int, **options: Any) -> Chooses:
    """Choose integer groups where groups divide the inputs, else one scale per channel."""
    return lambda name, inputs: Grouped("int4", size if inputs % size == 0 else inputs, **options)


FAST = ("gpt2", "mixtral", "granitemoe")


@pytest.mark.parametrize(
    "kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in ROWS]
)
def test_every_family_takes_stored_weights(kind: str, tmp_path: pathlib.Path):
    model = load_case(golden(ROWS[kind]), tmp_path / "case")
    stored, plain = stored_and_plain(model, tmp_path, groups_of(8, zeros=True))
    assert sum(is_stored(leaf) for leaf in jax.tree.leaves(stored.params, is_leaf=is_stored)) > 3
    assert_same(stored, plain)


QUICK = ("int8 a channel", "int4 in another order", "codebook, nested", "ggml")
EACH = [
    pytest.param(layout, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, layout in LAYOUTS.items()
]


@pytest.mark.parametrize("layout", EACH)
def test_every_storage(layout: Layout, tmp_path: pathlib.Path):
    model = random_model(hidden_size=64, intermediate_size=64, tie_word_embeddings=True)
    ordered = getattr(layout, "ordered", False)

    def choose(name: str, inputs: int) -> Layout | None:
        return None if ordered and "embed" in name else layout

    assert_same(*stored_and_plain(model, tmp_path, choose))


def test_unlike_storages_of_one_parameter_stay_separate(tmp_path: pathlib.Path):
    model = random_model(hidden_size=64, intermediate_size=96)

    def choose(name: str, inputs: int) -> Layout | None:
        if "q_proj" in name or "down_proj" in name:
            return Grouped("int4", 16, zeros=True)
        if "v_proj" in name or "gate_proj" in name:
            return Codebook(TABLE, 32)
        return None if "k_proj" in name or "up_proj" in name else Grouped("int8", inputs)

    stored, plain = stored_and_plain(model, tmp_path, choose)
    assert isinstance(stored.params["layers_0"]["attention"]["qkv"], Split)
    assert len(stored.params["layers_0"]["attention"]["qkv"].pieces) == 3
    assert_same(stored, plain)


def test_columns_of_different_orders_stay_separate(tmp_path: pathlib.Path):
    """The layout is one, but each of the three projections has a different input order."""
    stored, plain = stored_and_plain(
        random_model(hidden_size=64, intermediate_size=96), tmp_path, groups_of(16, ordered=True)
    )
    assert isinstance(stored.params["layers_0"]["attention"]["qkv"], Split)
    assert_same(stored, plain)


def test_experts_of_different_storages_are_refused(tmp_path: pathlib.Path):
    model = load_case(golden(ROWS["mixtral"]), tmp_path / "case")

    def choose(name: str, inputs: int) -> Layout | None:
        return Grouped("int8" if ".experts.1.w1" in name or ".experts.0.w3" in name else "int4", 4)

    with pytest.raises(CheckpointError, match="layers_0/mlp/gate_up would be made of weights that are stored in diff"):
        stored_and_plain(model, tmp_path, choose)


def test_biases_of_zeros_that_nobody_asks_for(tmp_path: pathlib.Path):
    """AutoGPTQ writes a bias for every linear layer. A nonzero one is not ignored."""
    name = "model.layers.0.mlp.down_proj"
    weight = StoredWeight((8, 8), Grouped("int8", 8), dict[str, Any]().__getitem__, 1)
    tensors = {f"{name}.bias": np.zeros(8, np.float32), "model.layers.0.mlp.up_proj.bias": np.zeros(8, np.float32)}
    write_tensors(tmp_path / "model.safetensors", tensors)
    opened = StoredCheckpoint(open_checkpoint(tmp_path), {f"{name}.weight": weight}, frozenset(), {})
    assert set(opened.tensors) == {f"{name}.weight", "model.layers.0.mlp.up_proj.bias"}
    write_tensors(tmp_path / "model.safetensors", {f"{name}.bias": np.eye(8, dtype=np.float32)[3]})
    opened = StoredCheckpoint(open_checkpoint(tmp_path), {f"{name}.weight": weight}, frozenset(), {})
    assert set(opened.tensors) == {f"{name}.weight", f"{name}.bias"}


def test_a_shape_that_config_json_does_not_ask_for(tmp_path: pathlib.Path):
    model = random_model(hidden_size=64, intermediate_size=96)
    name = "model.layers.0.mlp.down_proj.weight"
    weight = StoredWeight((64, 64), Grouped("int8", 64), dict[str, Any]().__getitem__, 1)
    with pytest.raises(CheckpointError, match=r"down_proj.weight' is \[64, 64\] where config.json asks \[64, 96\]"):
        storages(model.specs, {name: weight}, "float32")
