"""DP attention: devices with their own sequences and shared experts; tokens, bits, collectives, and memory."""

import collections
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.compilations import count_compilations
from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.engine.distributed.lockstep import Lockstep
from jaxinfer.engine.distributed.replicas import Replicas
from jaxinfer.engine.execution import commands
from jaxinfer.engine.execution.memory import plan_engine
from jaxinfer.engine.execution.placement import place_params, shardable_model
from jaxinfer.layers.moe import GLU, Experts, Routing, run_experts, run_sharded_experts
from jaxinfer.llm import LLM
from jaxinfer.models.model import Model
from jaxinfer.parallel.arrays import device_bytes
from jaxinfer.parallel.dp_attention import of_ranks, over_ranks
from jaxinfer.parallel.mesh import make_mesh, traced_for
from jaxinfer.quant import dense
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request
from tests.engine.test_identity import ROOMY, SETTINGS, TIGHT, make_requests, run
from tests.models.parity import load_case
from tests.models.test_parity import golden
from tests.parallel.devices.test_tensor import COLLECTIVES, generate, greedy, model_of
from tests.quant.examples import INPUTS, LAYOUTS, example

# A dense layer and a layer of 8 experts with a shared expert; MLA latents.
DEEPSEEK = "deepseek_v3-hub"
# Settings of the one device: the fewest programs, since greedy tokens do not depend on them.
ONE = {**SETTINGS, "prefill_sizes": (64,), "max_prefill_rows": 1}


def ranks_of(model: Model, count: int, **changes: Any) -> LLM:
    settings = {**SETTINGS, "num_pages": TIGHT, "expert_parallel_size": count, "enable_dp_attention": True, **changes}
    return LLM(model, **settings)


def _lockstep(llm: LLM) -> Lockstep:
    assert isinstance(llm.engine, Replicas)
    assert llm.engine.lockstep is not None
    return llm.engine.lockstep


def collectives(program: Any) -> collections.Counter[str]:
    return collections.Counter(re.findall(COLLECTIVES, program.as_text()))


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def same_logits(model: Model, ranks: int, bound: float = 1e-5) -> collections.Counter[str]:
    """Compare logits with one device, each rank having its own sequences, and return the program's collectives."""
    mesh, rng = make_mesh(dp_attn=ranks), np.random.default_rng(0)
    tokens = rng.integers(0, model.config.vocab_size, (2 * ranks, 24), np.int32)
    spread = shardable_model(model, mesh)
    params = place_params(spread, mesh)
    own = (_abstract(params), jax.ShapeDtypeStruct((2, 24), jnp.int32))
    with traced_for(mesh):
        program = jax.jit(over_ranks(spread.apply, own, shared=1)).lower(*of_ranks(own, mesh, shared=1)).compile()
    got, want = np.float32(program(params, tokens)), np.asarray(model.apply(model.params, jnp.asarray(tokens)))
    assert np.abs(got - want).max() < bound * np.abs(want).max()
    return collectives(program)


@pytest.mark.parametrize("ranks", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_logits_are_those_of_one_device_with_two_exchanges_a_layer(ranks):
    assert same_logits(model_of("experts"), ranks) == {"all-to-all": 2 * 2}


@pytest.mark.parametrize("ranks", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_logits_of_latents_and_a_shared_expert(ranks, tmp_path):
    assert same_logits(load_case(golden(DEEPSEEK), tmp_path), ranks) == {"all-to-all": 2}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_routing_travels_in_narrow_words(dtype):
    model = model_of("experts")
    model = model.replace(params=jax.tree.map(lambda x: x.astype(dtype), model.params))
    assert same_logits(model, 4, bound=0.3) == {"all-to-all": 2 * 2}


@pytest.mark.slow
def test_biases_of_experts():
    oss = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 16}
    model = model_of("experts", **oss)
    rng = np.random.default_rng(0)
    noisy = jax.tree.map(lambda x: x + 0.3 * rng.standard_normal(x.shape, np.float32), model.params)
    same_logits(model.replace(params=noisy), 2)


@pytest.mark.parametrize(
    "name", ["int8 in groups", *(pytest.param(each, marks=pytest.mark.slow) for each in ("codebook", "ggml"))]
)
def test_stored_experts(name):
    """Stored experts are sharded as they are: no rank dequantizes those of another."""
    mesh, rng = make_mesh(dp_attn=2), np.random.default_rng(0)
    gate_up, down = (example(LAYOUTS[name], out, seed=len(out)) for out in ((4, 2, INPUTS), (4, INPUTS)))
    x = rng.standard_normal((6, INPUTS), np.float32)
    chosen = np.array([[0, 3], [3, 1], [2, 0], [1, 2], [3, 2], [0, 1]], np.int32)
    routing = Routing(chosen, rng.uniform(0.1, 1, (6, 2)).astype(np.float32))
    dealt = jax.device_put(Experts(gate_up, down), NamedSharding(mesh, PartitionSpec("dp_attn")))
    own = (_abstract(dealt), jax.ShapeDtypeStruct((3, INPUTS), jnp.float32))
    own = (*own, Routing(jax.ShapeDtypeStruct((3, 2), jnp.int32), jax.ShapeDtypeStruct((3, 2), jnp.float32)))

    def layer(experts: Experts, x: jax.Array, routing: Routing) -> jax.Array:
        return run_sharded_experts(x, routing, experts, GLU("silu"))

    with traced_for(mesh):
        program = jax.jit(over_ranks(layer, own, shared=1)).lower(*of_ranks(own, mesh, shared=1)).compile()
    want = run_experts(
        jnp.asarray(x), Routing(*map(jnp.asarray, routing)), Experts(*map(dense, (gate_up, down))), GLU("silu")
    )
    np.testing.assert_allclose(program(dealt, x, routing), want, atol=1e-5 * float(jnp.abs(want).max()))
    assert collectives(program) == {"all-to-all": 2}


# ---- the engine


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_case(golden(DEEPSEEK), tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def two(deepseek: Model) -> LLM:
    return ranks_of(deepseek, 2)


def test_tokens_are_those_of_one_device(two):
    requests = greedy(40, two.model)
    want = generate(LLM(two.model, **ONE, num_pages=ROOMY), requests)
    with count_compilations() as compilations:
        assert generate(two, requests) == want
        assert generate(two, requests[::-1])[::-1] == want
    stats = two.engine.stats()
    assert compilations.count == 0
    assert stats.preemptions
    assert stats.prefix_hits > 0
    assert stats.kv.total == 2 * TIGHT
    assert all(engine.stats().finished for engine in two.engine._engines)


def test_bits_depend_neither_on_the_rank_nor_on_what_else_is_served(two, monkeypatch):
    monkeypatch.setattr("jaxinfer.engine.scheduling.pages.prefer_swap", lambda *_: True)
    requests = make_requests(24, two.model.config.vocab_size)
    want, swapped = [], two.engine.stats().preemptions["swap"]
    for number, request in enumerate(requests):
        two.engine.reset_prefix_cache()
        monkeypatch.setattr(two.engine, "_choose", lambda _, place=number % 2: two.engine._engines[place])
        want += run(two, [request])
    monkeypatch.undo()
    monkeypatch.setattr("jaxinfer.engine.scheduling.pages.prefer_swap", lambda *_: True)
    assert run(two, requests) == want
    assert run(two, requests[::-1])[::-1] == want
    assert two.engine.stats().preemptions["swap"] > swapped


def test_ranks_run_as_many_rows_as_the_one_with_the_most(deepseek, monkeypatch):
    settings = {"num_pages": ROOMY, "max_num_seqs": 32, "exactness": "relaxed"}
    llm, requests = (
        ranks_of(deepseek, 2, **settings, decode_sizes=(2, 4)),
        make_requests(12, deepseek.config.vocab_size),
    )
    want, used = generate(ranks_of(deepseek, 2, **settings), requests), set[int]()
    programs = _lockstep(llm).programs
    counting = {
        rows: lambda *operands, rows=rows, program=program: used.add(rows) or program(*operands)
        for rows, program in programs.decode.items()
    }
    monkeypatch.setattr(_lockstep(llm), "programs", dataclasses.replace(programs, decode=counting))
    assert generate(llm, requests) == want
    assert generate(llm, requests[:1]) == want[:1]
    assert len(used) > 1


def test_chunks_of_proved_sizes_run_together(two, monkeypatch):
    """A single call runs the smaller chunk of one rank together with the larger chunk of the other."""
    prompts, lockstep = [[3, 5, 7] * 20, [2, 4, 6] * 4], _lockstep(two)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    shapes = list[tuple[int, ...]]()
    make = lockstep._prefill

    def seen(asked: list[Any]) -> None:
        shapes.append(tuple(0 if one is None else one[0].batch.tokens.shape[1] for one in asked))
        make(asked)

    monkeypatch.setattr(lockstep, "_prefill", seen)
    tokens = []
    for classes in ({16: 0, 64: 1}, {16: 0, 64: 0}):
        two.engine.reset_prefix_cache()
        monkeypatch.setattr(lockstep, "size_classes", classes)
        tokens.append([output.outputs[0].token_ids for output in two.generate(prompts, params)])
    assert shapes == [(64, 0), (0, 16), (64, 16)]
    assert tokens[0] == tokens[1]


def test_a_request_can_be_ended_on_its_rank(two):
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, seed=0)
    for name in "abcd":
        two.engine.add(Request(name, (1, 2, 3), params))
    assert [engine.alive for engine in two.engine._engines] == [2, 2]
    two.engine.step()
    for name in "abcd":
        two.engine.abort(name)
    while two.engine.has_work:
        two.engine.step()
    two.engine.check()
    assert all(engine.alive == 0 for engine in two.engine._engines)


def test_ranks_move_as_many_pages_as_each_has(two):
    """A single call moves pages from and to each rank's own pages; a rank without transfers keeps its pages."""
    lockstep, rng = _lockstep(two), np.random.default_rng(0)
    (first, second), pools = lockstep.ranks, lockstep.pools
    lockstep.pools = [
        pool._replace(data=jax.device_put(rng.standard_normal(pool.data.shape, np.float32), pool.data.sharding))
        for pool in pools
    ]
    want = [np.array(pool.data) for pool in lockstep.pools]
    with count_compilations() as compiled:
        first.run(commands.ExportPages(np.int32([[1, 2, 3, 4]]), range(4)))
        second.run(commands.ExportPages(np.int32([[5]]), [2]))
        lockstep.run()
        first.run(commands.ImportPages([2], np.int32([[9]])))
        second.run(commands.ImportPages([2], np.int32([[8]])))
        lockstep.run()
        first.run(commands.ImportPages([3, 1, 0, 2], np.int32([[10, 11, 12, 13]])))
        lockstep.wait()
    assert compiled.count == 0
    for pool, data in zip(lockstep.pools, want, strict=True):
        data[[9, TIGHT + 8]] = data[[3, TIGHT + 5]]
        data[[10, 11, 12, 13]] = data[[4, 2, 1, 3]]
        np.testing.assert_array_equal(pool.data, data)
    two.engine.reset_prefix_cache()


def test_a_step_exchanges_tokens_and_nothing_else(two):
    run = _lockstep(two).programs
    assert collectives(run.widest_decode) == collectives(run.prefill_logprobs) == {"all-to-all": 2}
    for program in run.prefill.values():
        assert not collectives(program)  # a chunk ends with the keys of the last layer, before its experts
    for program in (run.copy, *run.export.values(), *run.restore.values(), run.admit, run.save_slot, run.restore_slot):
        assert not collectives(program)


def test_a_device_holds_its_own_pages_and_experts_and_the_plan_says_so(two):
    lockstep = _lockstep(two)
    config = EngineConfig(**SETTINGS, num_pages=TIGHT, expert_parallel_size=2, enable_dp_attention=True)
    needs = plan_engine(two.model, config, "cpu").needs
    pools = [pool.data for pool in lockstep.pools]
    assert needs.page * TIGHT == device_bytes(pools) == sum(x.nbytes for x in pools) // 2
    assert needs.page == two.model.cache_spec.bytes_per_page(16, 4)
    assert needs.weights == device_bytes(lockstep.params)
    assert needs.sampler == device_bytes(lockstep.sampler)
    mlp = lockstep.params["layers_1"]["mlp"]
    assert {shard.data.shape[0] for shard in mlp["gate_up"].addressable_shards} == {4}
    spread = [leaf for leaf in jax.tree.leaves(lockstep.params) if not leaf.sharding.is_fully_replicated]
    assert len(spread) == 2  # the two matrices of experts
    for program in (lockstep.programs.prefill[64, 1], *lockstep.programs.restore.values(), lockstep.programs.copy):
        assert program.memory_analysis().alias_size_in_bytes == device_bytes(pools)
    kept = device_bytes((lockstep.pools, lockstep.last_tokens, lockstep.sampler))
    assert lockstep.programs.widest_decode.memory_analysis().alias_size_in_bytes == kept


def test_each_device_is_reported_once_and_busy_while_any_rank_is(two):
    lockstep = _lockstep(two)
    before = two.memory()
    two.generate([[1, 2, 3]], SamplingParams(max_tokens=8))
    after = two.memory()
    assert [device.device for device in after.devices] == [device.id for device in lockstep.mesh.devices.flat]
    for device in after.devices:
        assert device.parts["weights"] == device_bytes((lockstep.params, lockstep._tower))
        assert device.parts["kv_cache"] == device_bytes(lockstep.pools)
        assert device.busy_seconds > before.devices[0].busy_seconds
    assert len({device.busy_seconds for device in after.devices}) == 1


def test_the_plan_of_a_cache_with_heads_has_all_of_them_on_each_rank():
    model = model_of("experts")
    config = EngineConfig(**SETTINGS, num_pages=TIGHT, expert_parallel_size=4, enable_dp_attention=True)
    assert plan_engine(model, config, "cpu").needs.page == model.cache_spec.bytes_per_page(16, 4)


REFUSED: dict[str, dict[str, Any]] = {
    "needs expert_parallel_size above 1": {"expert_parallel_size": 1},
    "and tensor_parallel_size = 2 exclude each other": {"tensor_parallel_size": 2},
    "and pipeline_parallel_size = 2 exclude each other": {"pipeline_parallel_size": 2},
    "and data_parallel_size = 2 exclude each other": {"data_parallel_size": 2},
    "and multi_step = 4 exclude each other": {"multi_step": 4},
    "8 devices do not divide the 4 expert of layers_0": {"expert_parallel_size": 8},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_is_refused_with_a_sentence(sentence):
    with pytest.raises(EngineConfigError, match=sentence):
        ranks_of(model_of("experts"), **{"count": 2, **_counted(REFUSED[sentence])})


def _counted(changes: dict[str, Any]) -> dict[str, Any]:
    return {"count" if name == "expert_parallel_size" else name: value for name, value in changes.items()}


def test_a_model_without_experts_is_refused():
    with pytest.raises(EngineConfigError, match="expert_parallel_size = 2 cannot be: the model has no experts"):
        ranks_of(model_of("groups"), 2)


MODES: dict[str, dict[str, Any]] = {
    "swapped": {},
    "recomputed": {"swap_space_gib": 0},
    "drafts": {"speculative": "ngram"},
    "synchronous": {"async_scheduling": False},
    "static": {"batching": "static"},
    "priority": {"scheduling_policy": "priority"},
    "no prefix cache": {"enable_prefix_caching": False},
    "relaxed": {"exactness": "relaxed"},
    "8-bit cache": {"kv_cache_dtype": "int8"},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_tokens_in_other_modes(mode, monkeypatch):
    model = model_of("experts")
    if mode == "swapped":
        monkeypatch.setattr("jaxinfer.engine.scheduling.pages.prefer_swap", lambda *_: True)
    requests, stored = greedy(60, model), MODES[mode].get("kv_cache_dtype", "auto")
    one = LLM(model, **ONE, num_pages=ROOMY, kv_cache_dtype=stored)
    want, llm = generate(one, requests), ranks_of(model, 2, **MODES[mode])
    assert generate(llm, requests) == want
    assert generate(llm, requests[::-1])[::-1] == want
    assert not llm.engine.stats().compilations


@pytest.mark.slow
def test_a_folder_is_loaded_where_it_is_served(deepseek, tmp_path):
    load_case(golden(DEEPSEEK), tmp_path)
    settings: dict[str, Any] = {**SETTINGS, "expert_parallel_size": 4, "enable_dp_attention": True}
    llm = LLM(str(tmp_path), "float32", **settings)
    given, placed = (model.params["layers_1"]["mlp"]["gate_up"] for model in (llm.model, _lockstep(llm)))
    at = {shard.device: shard.data.unsafe_buffer_pointer() for shard in given.addressable_shards}
    assert at == {shard.device: shard.data.unsafe_buffer_pointer() for shard in placed.addressable_shards}
    requests = greedy(12, deepseek)
    assert generate(llm, requests) == generate(LLM(deepseek, **ONE), requests)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["mixtral", "deepseek"])
def test_200_requests_have_the_tokens_of_one_device(name, ranks, deepseek):
    model = deepseek if name == "deepseek" else model_of("experts")
    requests = greedy(200, model)
    want = generate(LLM(model, **ONE, num_pages=ROOMY), requests)
    llm = ranks_of(model, ranks)
    assert generate(llm, requests) == want
    assert generate(llm, requests[::-1])[::-1] == want
    assert llm.engine.stats().prefix_hits > 0
