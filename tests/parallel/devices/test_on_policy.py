"""Log probabilities with the served bits on several devices: of the engine, and of the trainer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxinfer.llm import LLM
from jaxinfer.sampling_params import RequestError
from tests.engine.execution.test_on_policy import SETTINGS, generate, lengths_of, training_step
from tests.fakes import random_model


@pytest.mark.parametrize("settings", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}])
def test_a_trainer_has_the_bits_of_an_engine_on_several_devices(settings: dict[str, Any]):
    llm = LLM(random_model(), **SETTINGS, **settings)
    sequences = generate(llm)
    np.testing.assert_array_equal(training_step(llm.model, llm, sequences)[1], sequences.served)


@pytest.mark.parametrize("set_mesh", [False, True])
def test_a_batch_may_be_sharded(set_mesh):
    llm = LLM(random_model(), **SETTINGS)
    sequences, model = next(generate(llm).batches(16)), llm.model
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AxisType.Auto,))
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    params = jax.device_put(model.params, whole)
    tokens, lengths = (
        jax.device_put(jax.tree.map(jnp.asarray, each), split) for each in (sequences.tokens, lengths_of(sequences))
    )
    run = jax.jit(lambda params, tokens, lengths: model.logprobs(params, tokens, like=llm, **lengths))
    if set_mesh:
        with jax.set_mesh(mesh):
            found = run(params, tokens, lengths)
    else:
        found = run(params, tokens, lengths)
    np.testing.assert_array_equal(found, sequences.served)


def test_a_shard_map_is_refused():
    llm = LLM(random_model(), **SETTINGS)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))
    split, whole, model = PartitionSpec("data"), PartitionSpec(), llm.model

    def run(params: Any, tokens: Any) -> Any:
        return model.logprobs(params, tokens, like=llm)

    mapped = jax.shard_map(run, mesh=mesh, in_specs=(whole, split), out_specs=split)
    with pytest.raises(RequestError, match="shard_map"):
        mapped(model.params, jnp.ones((2, 8), jnp.int32))


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"pipeline_parallel_size": 2}, "pipeline_parallel_size = 2"), ({"enable_dp_attention": True}, "dp_attention")],
)
def test_programs_that_are_not_one_are_refused(settings, words):
    if "enable_dp_attention" in settings:
        pytest.skip("only mixtures of experts have ranks")
    llm = LLM(random_model(), **SETTINGS, **settings)
    with pytest.raises(RequestError, match=words):
        llm.model.logprobs(llm.model.params, jnp.ones((1, 8), jnp.int32), like=llm)
