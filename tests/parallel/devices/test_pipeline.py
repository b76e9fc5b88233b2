"""Pipeline stages and replicas change no logits, tokens or bits compared with one device."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.engine.distributed.replicas import Replicas
from jaxinfer.engine.execution.memory import plan_engine
from jaxinfer.engine.execution.placement import place_params, shardable_model
from jaxinfer.engine.execution.stages import cut
from jaxinfer.layers.attention import causal_attend
from jaxinfer.llm import LLM
from jaxinfer.loading import load_model
from jaxinfer.models.model import Model
from jaxinfer.parallel.arrays import device_bytes
from jaxinfer.parallel.mesh import make_mesh, mesh_for, stages, traced_for
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request
from tests.engine.test_identity import ROOMY, SETTINGS, TIGHT, alone, make_requests, run
from tests.models.parity import load_case
from tests.models.test_parity import golden
from tests.parallel.devices.test_tensor import generate, greedy, model_of, same_tokens_of_200
from tests.parallel.devices.test_tensor import same_logits as same_logits_on

FIVE: dict[str, Any] = {"num_hidden_layers": 5}
# Differing layers, tied embeddings, learned positions, a dense layer before mixtures, MLA latents.
CASES = ("gemma2-window", "gpt2-hub", "deepseek_v3-hub")
# One model of each family whose heads two devices can share.
FAMILIES = (
    "deepseek_v2-all-sparse",
    "falcon-11b",
    "gemma-gelu-hub",
    "gemma3_text-linear-hub",
    "gpt_oss-clamped",
    "gptj-gelu",
    "mixtral-hub",
    "phi-grouped",
    "phi3-longrope-long-hub",
    "qwen2_moe-dense-layers",
    "qwen3_moe-bias-dense-layers",
    *("olmo2-hub", "olmo3-yarn-hub", "granite-hub", "smollm3-windows", "cohere-hub", "cohere2-hub", "glm-hub"),
    *("glm4-hub", "exaone4-hub", "ernie4_5-hub", "hunyuan_v1_dense-alpha-hub", "gpt_neox-hub", "gpt_neox-serial"),
    *("starcoder2-hub", "stablelm-hub", "stablelm-parallel", "seed_oss-biases", "ministral3-hub"),
    *("glm4_moe-hub", "glm4_moe-groups-tied", "minimax_m2-hub", "llama4_text-hub", "olmoe-hub", "phimoe-hub"),
    *("ernie4_5_moe-hub", "granite-tied-hub", "smollm3-tied-hub"),
)


def same_logits(model: Model, count: int, tensor: int = 1) -> None:
    """Compare logits with one device, within 1e-5 of the largest, each stage on its own devices."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 24)))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
    mesh = make_mesh(tensor, stage=count)
    x = tokens
    for stage, own in zip(cut(shardable_model(model, mesh), count), stages(mesh), strict=True):
        with traced_for(own):
            params, x = place_params(stage.model, own), np.asarray(x)
            x, _ = jax.jit(lambda params, x, stage=stage: stage.backbone(params, x, positions, causal_attend, None))(
                params, x
            )
            assert {device for leaf in jax.tree.leaves(params) for device in leaf.devices()} == set(own.devices.flat)
            if stage.last:
                x = jax.jit(stage.head)(params, x)
    want = np.asarray(model.apply(model.params, tokens))
    assert np.abs(np.asarray(x) - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize(
    ("count", "tensor"), [(3, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(2, 1), (4, 2), (5, 1)])]
)
def test_logits_are_those_of_one_device(count, tensor):
    same_logits(model_of("biases", **FIVE), count, tensor)


@pytest.mark.parametrize("name", CASES)
def test_logits_of_models_whose_layers_differ(name, tmp_path):
    same_logits(load_case(golden(name), tmp_path), 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_every_family(name, tmp_path):
    model = load_case(golden(name), tmp_path)
    same_logits_on(model, make_mesh(2))
    same_logits(model, 2, 2)


def spread_llm(model: Model, **changes: Any) -> LLM:
    return LLM(model, **{**SETTINGS, "num_pages": TIGHT, **changes})


@pytest.fixture(scope="module")
def five() -> Model:
    return model_of("few KV heads", **FIVE)


@pytest.mark.slow
def test_tokens_of_all_axes_are_those_of_one_device(five):
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}
    requests = greedy(40, five)
    want = generate(spread_llm(five, num_pages=ROOMY), requests)
    llm = spread_llm(five, **sizes)
    assert generate(llm, requests) == want
    assert generate(llm, requests[::-1])[::-1] == want
    stats = llm.engine.stats()
    assert stats.preemptions
    assert stats.prefix_hits > 0
    assert not stats.compilations
    assert stats.kv.total == 2 * TIGHT
    assert isinstance(llm.engine, Replicas)
    assert all(engine.stats().finished for engine in llm.engine._engines)


@pytest.mark.slow
def test_stages_work_at_the_same_time(five):
    """When a step is read, one later step for each other stage is already launched, with different slots."""
    llm = spread_llm(five, pipeline_parallel_size=4, num_pages=ROOMY)
    engine, seen = llm.engine, collections.Counter()
    assert not isinstance(engine, Replicas)
    read = engine._runner.read

    def watched(launched):
        if launched is not None and launched.plan.decodes and len(engine._scheduler._running) == 8:
            microbatches = [launched.plan.microbatch, *(each.plan.microbatch for each in engine._pending)]
            seen[len(set(microbatches))] += 1
        return read(launched)

    engine._runner.read = watched
    llm.generate([[3, 5, 7 + i] for i in range(8)], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    assert seen[4] > 0.9 * seen.total()


def test_who_takes_another_slot_in_flight_keeps_its_own_tokens(five, monkeypatch):
    """A sequence of three stages moves to a slot that sampled other tokens while its last row is in flight."""
    monkeypatch.setattr("jaxinfer.engine.scheduling.pages.prefer_swap", lambda *_: True)
    settings = {"max_num_seqs": 6, "pipeline_parallel_size": 3, "scheduling_policy": "priority", "num_pages": ROOMY}
    engine = spread_llm(five, **settings).engine
    want = tokens_of_the_least_urgent(engine, None)
    for when in range(6, 12):  # all microbatches of slots
        assert tokens_of_the_least_urgent(engine, when) == want
    assert engine.stats().preemptions["swap"] == 6


def tokens_of_the_least_urgent(engine: Any, when: int | None) -> list[int]:
    """Return tokens of one of six requests, preempted after ``when`` steps and resumed in an aborted one's slot."""
    tokens: list[int] = []

    def add(name: str, priority: int) -> None:
        params = SamplingParams(temperature=1.0, seed=len(name), max_tokens=24, ignore_eos=True)
        engine.add(Request(name, tuple(range(3, 3 + len(name))), params, priority=priority, cache_salt=name))

    def step() -> None:
        for delta in engine.step():
            if delta.request_id == "moves":
                tokens.extend(delta.token_ids)

    for name in ("a", "aborted", "bb", "ccc", "dddd", "moves"):
        add(name, int(name == "moves"))
    for _ in range(when or 0):
        step()
    if when is not None:
        add("urgent", -1)
        step()
        engine.abort("aborted")
    while engine.has_work:
        step()
    assert len(tokens) == 24
    return tokens


@pytest.mark.slow
def test_bits_do_not_depend_on_what_else_is_served(five):
    settings = {**SETTINGS, "pipeline_parallel_size": 3}
    requests = make_requests(24, five.config.vocab_size)
    want = alone(five, requests, **settings)
    llm = LLM(five, **{**settings, "num_pages": TIGHT})
    assert run(llm, requests) == want
    assert run(llm, requests[::-1])[::-1] == want
    assert llm.engine.stats().preemptions


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"swap_space_gib": 0}, {"speculative": "ngram"}, {"async_scheduling": False}, {"batching": "static"}],
    ids=lambda changes: next(iter(changes)),
)
def test_bits_in_other_modes(five, changes):
    settings = {**SETTINGS, "pipeline_parallel_size": 2, "data_parallel_size": 2}
    requests = make_requests(60, five.config.vocab_size)
    want = alone(five, requests, **SETTINGS, pipeline_parallel_size=2)
    assert run(LLM(five, **{**settings, "num_pages": TIGHT, **changes}), requests) == want


PRODUCTS = [(1, 2, 1), (1, 4, 1), (1, 1, 2), (2, 2, 2), (2, 4, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "stage", "data"), PRODUCTS)
@pytest.mark.parametrize("mode", ["swapped", "recomputed"])
def test_200_requests_have_the_tokens_of_one_device(five, tensor, stage, data, mode, monkeypatch):
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stage, "data_parallel_size": data}
    same_tokens_of_200(five, mode, monkeypatch, **sizes)


def test_steps_of_few_rows_have_the_bits_of_those_of_all(five):
    """Each stage has a decode program for 8 and for 16 rows."""
    settings = {**SETTINGS, "num_pages": ROOMY, "max_num_seqs": 32, "pipeline_parallel_size": 2}
    llm, requests = LLM(five, **settings, decode_sizes=(8,)), make_requests(12, five.config.vocab_size)
    assert llm.engine.calibration.decode_sizes == [8, 16]
    want = run(LLM(five, **settings), requests)
    assert run(llm, requests) == want
    assert run(llm, requests[:2]) == want[:2]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_models_whose_layers_differ_are_served(name, tmp_path):
    model = load_case(golden(name), tmp_path)
    requests = greedy(24, model)
    want = generate(spread_llm(model, num_pages=ROOMY), requests)
    assert generate(spread_llm(model, pipeline_parallel_size=2, num_pages=40), requests) == want


@pytest.mark.slow
def test_a_stage_holds_its_layers_alone_and_the_plan_says_so(five):
    config = EngineConfig(**SETTINGS, num_pages=TIGHT, pipeline_parallel_size=2, data_parallel_size=2)
    llm = LLM(five, config=config)
    needs = plan_engine(five, config, "cpu").needs
    held: collections.Counter[jax.Device] = collections.Counter()
    for engine in llm.engine._engines:
        first, last = engine._executor.runtimes
        assert set(first.params) == {"embed", "layers_0", "layers_1", "layers_2"}
        assert set(last.params) == {"layers_3", "layers_4", "final_norm", "head"}
        for part in (first, last):
            assert device_bytes([pool.data for pool in part.pools]) == len(part.pools) * TIGHT * 2 * 2 * 16 * 8 * 4
            for leaf in jax.tree.leaves((part.params, [pool.data for pool in part.pools])):
                held.update({shard.device: shard.data.nbytes for shard in leaf.addressable_shards})
    assert len(held) == 4
    told = {each.device: each.parts["weights"] + each.parts["kv_cache"] for each in llm.memory().devices}
    assert told == {device.id: size for device, size in held.items()}
    assert max(held.values()) == needs.weights + TIGHT * needs.page


def test_a_folder_is_loaded_where_it_stays():
    config = EngineConfig(pipeline_parallel_size=2, data_parallel_size=2)
    mesh = mesh_for(config)
    model, one = (load_model("demo-draft", show_progress=False, mesh=each) for each in (mesh, None))
    last = len(one.config.layers) - 1
    assert model.params["layers_0"]["attention"]["qkv"].devices() == set(mesh.devices[:, 0].flat)
    assert model.params[f"layers_{last}"]["attention"]["qkv"].devices() == set(mesh.devices[:, 1].flat)
    for got, want in zip(jax.tree.leaves(model.params), jax.tree.leaves(one.params), strict=True):
        np.testing.assert_array_equal(np.float32(got), np.float32(want))
    for replica in mesh.devices:
        own = stages(make_mesh(stage=2, devices=list(replica.flat)))
        for stage, place in zip(cut(model, 2), own, strict=True):
            for given, placed in zip(
                jax.tree.leaves(stage.model.params), jax.tree.leaves(place_params(stage.model, place)), strict=True
            ):
                at = {shard.device: shard.data.unsafe_buffer_pointer() for shard in given.addressable_shards}
                for shard in placed.addressable_shards:  # no copies, except of the table that two stages need
                    assert at.get(shard.device, 0) in (0, shard.data.unsafe_buffer_pointer())


REFUSED: dict[str, dict[str, Any]] = {
    "pipeline_parallel_size = 6 cannot be: the model has 5 layers": {"pipeline_parallel_size": 6},
    "pipeline_parallel_size = 0 must be at least 1": {"pipeline_parallel_size": 0},
    "data_parallel_size x pipeline_parallel_size x tensor_parallel_size = 2 x 2 x 4 needs 16 devices": {
        "data_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "tensor_parallel_size": 4,
    },
    "multi_step = 4 and pipeline_parallel_size = 2 exclude each other": {
        "multi_step": 4,
        "pipeline_parallel_size": 2,
    },
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_impossible_sums_are_refused_with_the_arithmetic(five, sentence):
    with pytest.raises(EngineConfigError, match=sentence):
        spread_llm(five, **REFUSED[sentence])
