"""Log probabilities with the served bits on several devices: of the engine, and of the trainer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxinfer.llm import LLM
from jaxinfer.models.model import Model
from jaxinfer.sampling_params import RequestError
from tests.engine.execution.test_on_policy import (
    LORAS,
    PROMPTS,
    SETTINGS,
    adapters_of,
    applied_gradient,
    generate,
    generate_mixed,
    lengths_of,
    require_close,
    training_step,
)
from tests.fake_vision import vision_model
from tests.fakes import random_head, random_model
from tests.models.parity import load_case
from tests.models.test_parity import golden
from tests.parallel.devices.test_tensor import model_of

STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
SPREAD: list[dict[str, Any]] = [TENSOR, {"data_parallel_size": 2}, STAGES]


@pytest.mark.parametrize("settings", SPREAD)
def test_a_trainer_has_the_bits_of_an_engine_on_several_devices(settings: dict[str, Any]):
    llm = LLM(random_model(), **SETTINGS, **settings)
    sequences = generate(llm)
    gradient, found = training_step(llm.model, llm, sequences)
    np.testing.assert_array_equal(found, sequences.served)
    require_close(gradient, applied_gradient(llm.model, sequences))


def test_the_rows_of_a_stage_are_those_of_a_microbatch():
    llm = LLM(random_model(), **SETTINGS, **STAGES)
    programs, sequences = llm.served_programs(), generate(llm)
    assert programs.rows == SETTINGS["max_num_seqs"] // 2
    more = dataclasses.replace(programs, engine=dataclasses.replace(programs.engine, decode_sizes=(64,)))
    assert 0 < np.abs(training_step(llm.model, more, sequences)[1] - sequences.served).max() < 1e-4


def with_head(method: str) -> Model:
    model = random_model(num_hidden_layers=4)
    return model.replace(draft=random_head(method, model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (functools.partial(random_model, num_hidden_layers=5), {"pipeline_parallel_size": 3, "max_num_seqs": 6}),
        (random_model, {**STAGES, **TENSOR, "data_parallel_size": 2}),
        (random_model, {**STAGES, "speculative": "ngram", "speculative_adaptive": False}),
        (functools.partial(with_head, "eagle3"), {**STAGES, "speculative": "eagle3", "speculative_adaptive": False}),
        (functools.partial(vision_model, axes=True, deep=1), STAGES),
        (functools.partial(random_model, "bfloat16"), STAGES),
    ],
)
def test_stages_have_the_bits_of_the_engine(model, settings):
    llm = LLM(model(), **{**SETTINGS, **settings})
    sequences = generate(llm)
    np.testing.assert_array_equal(training_step(llm.model, llm, sequences)[1], sequences.served)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next-hub", "lfm2-hub"])
def test_stages_with_states_have_the_bits_of_the_engine(name, tmp_path):
    llm = LLM(load_case(golden(name), tmp_path), **{**SETTINGS, "max_model_len": 128}, **STAGES)
    sequences = generate(llm, PROMPTS[::2])
    np.testing.assert_array_equal(training_step(llm.model, llm, sequences)[1], sequences.served)


MESHES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("groups", TENSOR),
    "tp4, copied heads": ("few KV heads", {"tensor_parallel_size": 4}),
    "pp2, tied": ("tied", STAGES),
    "tp2 x pp2": ("groups", TENSOR | STAGES),
    "ep2": ("experts", {"expert_parallel_size": 2}),
    "ep2 x tp2": ("experts", TENSOR | {"expert_parallel_size": 2}),
}
FAST = ("tp4, copied heads", "pp2, tied")


@pytest.mark.parametrize("mesh", [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in MESHES])
def test_adapters_have_the_bits_of_an_engine_on_several_devices(mesh):
    kind, sizes = MESHES[mesh]
    llm = LLM(model_of(kind, num_hidden_layers=2), **{**SETTINGS, **LORAS}, **sizes)
    adapters = adapters_of(llm.model)
    generated = generate_mixed(llm, adapters)
    for name, sequences in generated.items():
        found = llm.model.logprobs(
            llm.model.params, jnp.asarray(sequences.tokens), like=llm, **lengths_of(sequences), lora=adapters.get(name)
        )
        np.testing.assert_array_equal(found, sequences.served)
    gradient, found = training_step(llm.model, llm, generated["pirate"], adapters["pirate"])
    np.testing.assert_array_equal(found, generated["pirate"].served)
    require_close(gradient, applied_gradient(llm.model, generated["pirate"], adapters["pirate"]))


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
