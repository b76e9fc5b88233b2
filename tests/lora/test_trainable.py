"""New adapters: initially without effect, with gradients for their arrays."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.lora.adapter import Adapter
from jaxinfer.lora.merge import declared
from jaxinfer.lora.parts import parts
from jaxinfer.lora.trainable import init_adapter, traced_parts
from jaxinfer.models.model import Model
from jaxinfer.quant.banks import lora_targets
from tests.lora.goldens import GOLDENS, golden, load_base, read


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_base(golden("llama-qv"), tmp_path_factory.mktemp("llama"))


def mean(adapter: Adapter, model: Model) -> jax.Array:
    tokens = jnp.asarray([golden("llama-qv").tokens])
    logprobs = jax.nn.log_softmax(model.with_lora(adapter)(tokens[:, :-1]))
    return jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()


def test_it_changes_nothing_and_has_the_rank_that_was_asked_for(model: Model):
    adapter = init_adapter(model, 3, jax.random.key(0))
    tokens = jnp.asarray([golden("llama-qv").tokens])
    assert (model.with_lora(adapter)(tokens) == model(tokens)).all()
    assert {path[-1] for path in adapter.deltas} == {"qkv", "out", "gate_up", "down"}
    assert all(delta.a.shape[0] == delta.b.shape[-1] == 3 for delta in adapter.deltas.values())
    a = np.concatenate([delta.a.ravel() * delta.a.shape[1] ** 0.5 for delta in adapter.deltas.values()])
    assert abs(a.std() - 1) < 0.1


def test_names_choose_parameters_and_experts_are_left_out(tmp_path_factory: pytest.TempPathFactory, model: Model):
    chosen = init_adapter(model, 1, jax.random.key(0), names=["qkv"])
    assert {path[-1] for path in chosen.deltas} == {"qkv"}
    mixtral = load_base(golden("mixtral-experts"), tmp_path_factory.mktemp("mixtral"))
    assert all(delta.a.ndim == 2 for delta in init_adapter(mixtral, 1, jax.random.key(0)).deltas.values())


@pytest.mark.parametrize(
    ("rank", "options", "named"),
    [(0, {}, "rank is 0"), (2, {"names": ["q_proj"]}, "'q_proj' is no parameter.*down, gate_up, out, qkv")],
)
def test_bad_choices_are_named(rank: int, options: Mapping[str, Any], named: str, model: Model):
    with pytest.raises(ValueError, match=named):
        init_adapter(model, rank, jax.random.key(0), **options)


def test_traced_parts_are_those_of_the_host(model: Model):
    targets = lora_targets(declared(model), declared(model), 4)
    adapter = read(GOLDENS / "llama-dora", model)
    traced = jax.jit(lambda adapter: traced_parts(adapter, targets))(adapter)
    known = {name: array for part in parts(adapter, targets) for name, array in part.items()}
    assert traced.keys() == known.keys()
    for name, array in known.items():
        np.testing.assert_array_equal(traced[name], array)


def test_gradients_are_those_of_small_changes(model: Model):
    adapter = read(GOLDENS / "llama-qv", model)
    keys = iter(jax.random.split(jax.random.key(1), 8))
    way = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape), adapter)
    gradient = jax.grad(mean)(adapter, model)
    assert gradient.deltas.keys() == adapter.deltas.keys()
    slope = sum(jax.tree.leaves(jax.tree.map(lambda one, other: (one * other).sum(), gradient, way)))
    step = 1e-3
    ahead, behind = (
        mean(jax.tree.map(lambda leaf, by: leaf + sign * by, adapter, way), model)  # noqa: B023
        for sign in (step, -step)
    )
    assert float(slope) == pytest.approx(float((ahead - behind) / (2 * step)), rel=2e-2)
