"""Hidden states sharded over tokens (`sequence_parallel_norms`): same logits, tokens and bits, other collectives."""

import collections
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import EngineConfig, EngineConfigError, resolve
from jaxinfer.engine.execution.commands import PrefillBatch
from jaxinfer.engine.execution.placement import abstract_arrays, place_params, shardable_model
from jaxinfer.engine.execution.prepare import resolve_for
from jaxinfer.engine.execution.stages import Stage
from jaxinfer.engine.execution.step import make_prefill_logprobs
from jaxinfer.llm import LLM
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import make_mesh, mesh_for, traced_for
from jaxinfer.parallel.tokens import all_tokens, own_tokens, tokens_spread
from jaxinfer.sampling import SamplingLimits
from jaxinfer.types import CacheSpec, LayerSpec
from tests.engine.test_identity import ROOMY, SETTINGS, TIGHT, alone, make_requests, run
from tests.models.parity import load_case
from tests.models.test_parity import golden
from tests.parallel.devices.test_pipeline import CASES, FAMILIES
from tests.parallel.devices.test_tensor import COLLECTIVES, generate, greedy, model_of, same_tokens_of_200, spread_llm

ON: dict[str, Any] = {"sequence_parallel_norms": True}


def same_logits(model: Model, mesh: jax.sharding.Mesh) -> None:
    """Compare logits with one device, within 1e-5 of the largest; one dimension of tokens, as in a prefill program."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, model.config.vocab_size, (8, 24)))
    spread = shardable_model(model, mesh)
    with traced_for(mesh), tokens_spread():
        got = jax.jit(spread.apply)(place_params(spread, mesh), tokens)
    want = np.asarray(model.apply(model.params, tokens))
    assert np.abs(np.asarray(got) - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize(
    ("name", "tensor", "expert"),
    [
        ("biases", 4, 1),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                ("few KV heads", 4, 1),
                ("one KV head", 8, 1),
                ("query and key norms", 2, 1),
                ("tied, odd vocabulary", 2, 1),
                ("experts", 2, 2),
                ("experts", 1, 4),
                ("experts", 2, 4),
            ]
        ),
    ],
)
def test_logits_are_those_of_one_device(name, tensor, expert):
    same_logits(model_of(name), make_mesh(tensor, expert=expert))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *FAMILIES])
def test_logits_of_every_family(name, tmp_path):
    same_logits(load_case(golden(name), tmp_path), make_mesh(2))


def test_nothing_is_spread_unless_it_is_asked_for():
    x = jnp.ones((8, 4))
    with traced_for(make_mesh(4)):
        for wanted, count in ((False, 0), (True, 1)):
            with tokens_spread(wanted):
                made = [jax.make_jaxpr(lambda x, f=f: f(x))(x) for f in (own_tokens, all_tokens)]
            assert [str(each).count("sharding_constraint[") for each in made] == [count, count]
        assert own_tokens(x) is x
    with tokens_spread():
        assert own_tokens(x) is x  # one device


def test_each_sum_is_kept_in_parts_and_gathered_behind_the_norm():
    """XLA:CPU splits a reduce-scatter into an all-reduce and a slice. On GPUs it is one op (test_topologies)."""
    config = EngineConfig(**SETTINGS, num_pages=TIGHT, tensor_parallel_size=4, **ON)
    mesh = mesh_for(config)
    stage = Stage(shardable_model(model_of("few KV heads"), mesh))
    engine = resolve_for(stage.model, config, "cpu")
    arrays = abstract_arrays(stage, engine, SamplingLimits(max_logprobs=0), mesh)
    one, tokens = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((64,), jnp.int32)
    tables = jax.ShapeDtypeStruct((1, 1, engine.table_width), jnp.int32)
    batch = PrefillBatch(jax.ShapeDtypeStruct((1, 64), jnp.int32), one, one, tables)
    prefill = make_prefill_logprobs(stage, 0, spread_tokens=True)
    with traced_for(mesh):
        text = jax.jit(prefill).lower(arrays.params, arrays.pools, batch, None, tokens).compile().as_text()
    assert collections.Counter(re.findall(COLLECTIVES, text)) == {"all-reduce": 2 * 2 + 1, "all-gather": 2 * 2 + 1 + 1}
    gathered = re.findall(r"= f32\[(\d+),(\d+)\]\S* all-gather\(", text)
    assert gathered == [("64", "64")] * 5 + [("64", "96")]  # hidden states, then logits


@pytest.mark.slow
def test_tokens_are_those_of_one_device():
    four = spread_llm(model_of("few KV heads"), 4, **ON)
    requests = greedy(24, four.model)
    want = generate(LLM(four.model, **SETTINGS, num_pages=ROOMY), requests)
    assert generate(four, requests) == want
    assert generate(four, requests[::-1])[::-1] == want
    stats = four.engine.stats()
    assert stats.preemptions
    assert stats.prefix_hits > 0


REFUSED: dict[str, dict[str, Any]] = {
    "needs tensor_parallel_size or expert_parallel_size above 1: nothing is summed": {"data_parallel_size": 2},
    "and enable_dp_attention = True exclude each other": {"expert_parallel_size": 2, "enable_dp_attention": True},
    "cannot be: 6 devices do not divide a chunk of 32 tokens (prefill_sizes)": {
        "tensor_parallel_size": 2,
        "expert_parallel_size": 3,
        "prefill_sizes": (32, 64),
    },
    "cannot be: 8 devices do not divide a chunk of 4 tokens (prefill_sizes)": {
        "tensor_parallel_size": 8,
        "prefill_sizes": (4, 64),
    },
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_is_refused(sentence):
    config = EngineConfig(**ON, **REFUSED[sentence])
    with pytest.raises(EngineConfigError, match=f"^sequence_parallel_norms = True {re.escape(sentence)}"):
        resolve(config, CacheSpec((LayerSpec(),), 8, 8), max_position=512, itemsize=4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["swapped", "recomputed"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("groups", {"tensor_parallel_size": 8}),
        ("experts", {"tensor_parallel_size": 2, "expert_parallel_size": 2}),
        ("few KV heads", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}),
    ],
)
def test_200_requests_have_the_tokens_of_one_device(name, sizes, mode, monkeypatch):
    same_tokens_of_200(model_of(name), mode, monkeypatch, **sizes, **ON)


@pytest.mark.slow
def test_bits_do_not_depend_on_what_else_is_served():
    model = model_of("few KV heads")
    requests = make_requests(40, model.config.vocab_size)
    settings = {**SETTINGS, "tensor_parallel_size": 4, **ON}
    want = alone(model, requests, **settings)
    llm = LLM(model, **{**settings, "num_pages": TIGHT})
    assert run(llm, requests) == want
    assert run(llm, requests[::-1])[::-1] == want
