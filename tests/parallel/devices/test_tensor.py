"""Tensor parallelism changes no logits, tokens or engine behaviour compared with one device."""

import collections
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.engine.execution.memory import _held, plan_engine
from jaxinfer.engine.execution.placement import place_params, shardable_model
from jaxinfer.llm import LLM
from jaxinfer.loading import load_model
from jaxinfer.models.model import Model
from jaxinfer.parallel.arrays import device_bytes
from jaxinfer.parallel.mesh import RULES, make_mesh, param_sharding, traced_for
from jaxinfer.quant import Unquantized
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import ParamSpec
from jaxinfer.weights import load_params, on_devices, save_params
from jaxinfer.weights.tree import Fill, Path
from pallas_kernels import matmul as dense_matmul
from tests.engine.test_identity import ROOMY, SETTINGS, TIGHT, alone, make_requests, run
from tests.fakes import llama_json, random_model

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
# Each entry changes one setting of the layout.
SHAPES: dict[str, dict[str, Any]] = {
    "groups": {},
    "a KV head for each query": {"num_key_value_heads": 8},
    "few KV heads": {"num_key_value_heads": 2},
    "one KV head": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "query and key norms": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8},
    "odd vocabulary": {"vocab_size": 97},
    "experts": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "tied": {"tie_word_embeddings": True},
    "tied, odd vocabulary": {"tie_word_embeddings": True, "vocab_size": 97},
}
COLLECTIVES = r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\("


def model_of(name: str = "groups", **changes: Any) -> Model:
    return random_model(**{**SHAPE, **SHAPES[name], **changes})


def same_logits(model: Model, mesh: jax.sharding.Mesh) -> None:
    """Compare logits with one device, within 1e-5 of the largest."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 24)))
    spread = shardable_model(model, mesh)
    with traced_for(mesh):
        got = jax.jit(spread.apply)(place_params(spread, mesh), tokens)
    want = np.asarray(model.apply(model.params, tokens))
    assert np.abs(np.asarray(got) - want).max() < 1e-5 * np.abs(want).max()


FAST = [("biases", 2), ("few KV heads", 4), ("one KV head", 8), ("tied, odd vocabulary", 2)]
MORE = [*((name, 2) for name in SHAPES), ("groups", 8)]


@pytest.mark.parametrize(
    ("name", "tensor"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE if each not in FAST)]
)
def test_logits_are_those_of_one_device(name, tensor):
    same_logits(model_of(name), make_mesh(tensor))


def test_biases_within_a_kernels_launch(monkeypatch):
    """Each device adds its shard of the biases; XLA replaces the kernel here."""
    launched, by_xla = [], dense_matmul.matmul

    def stand_in(x, weight, extras, **options):
        launched.append(extras.bias is not None)
        return by_xla(x, weight, extras, **options | {"path": "xla"})

    monkeypatch.setattr(Unquantized, "by_kernel", lambda *_, **__: True)
    monkeypatch.setattr(dense_matmul, "matmul", stand_in)
    model = model_of("biases")
    filled = jax.tree.map_with_path(lambda path, x: x + 0.5 if "bias" in str(path[-1]) else x, model.params)
    same_logits(model.replace(params=filled).for_kernels("mosaic"), make_mesh(2))
    assert set(launched) == {True, False}


def greedy(count: int, model: Model) -> Any:
    requests = make_requests(count, model.config.vocab_size)
    return [(prompt, dataclasses.replace(params, temperature=0.0)) for prompt, params in requests]


def generate(llm: LLM, requests: Any) -> list[list[list[int]]]:
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    llm.engine.check()
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def same_tokens_of_200(model: Model, mode: str, monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Compare tokens with one device, twice, with few pages; sequences are "swapped" or "recomputed"."""
    requests = greedy(200, model)
    want = generate(LLM(model, **SETTINGS, num_pages=ROOMY), requests)
    settings: dict[str, Any] = {**SETTINGS, **sizes, "num_pages": TIGHT}
    if mode == "swapped":
        monkeypatch.setattr("jaxinfer.engine.scheduling.pages.prefer_swap", lambda *_: True)
    else:
        settings["swap_space_gib"] = 0
    llm = LLM(model, **settings)
    assert generate(llm, requests) == want
    assert generate(llm, requests[::-1])[::-1] == want
    stats = llm.engine.stats()
    assert stats.preemptions.get("swap" if mode == "swapped" else "recompute", 0) > 0
    assert stats.prefix_hits > 0


def spread_llm(model: Model, tensor: int, **changes: Any) -> LLM:
    settings = {**SETTINGS, "num_pages": TIGHT, "tensor_parallel_size": tensor, **changes}
    return LLM(model, **settings)


@pytest.fixture(scope="module")
def two() -> LLM:
    return spread_llm(model_of(), 2)


def test_tokens_are_those_of_one_device(two):
    requests = greedy(24, two.model)
    want = generate(LLM(two.model, **SETTINGS, num_pages=ROOMY), requests)
    assert generate(two, requests) == want
    assert generate(two, requests[::-1])[::-1] == want
    stats = two.engine.stats()
    assert stats.preemptions
    assert stats.prefix_hits > 0


def test_a_decode_step_has_two_sums_a_layer_and_gathers_logits_alone(two):
    run = two.engine._executor.runtimes[-1].run
    for program in (run.widest_decode, run.prefill_logprobs):
        text = program.as_text()
        found = collections.Counter(re.findall(COLLECTIVES, text))
        # The extra sum is the embedding, whose rows are sharded.
        assert found == {"all-reduce": 2 * 2 + 1, "all-gather": 1}
        gathered = re.findall(r"= f32\[(\d+),(\d+)\]\S* all-gather\(", text)
        assert [int(columns) for _, columns in gathered] == [96]
    prefill = collections.Counter(re.findall(COLLECTIVES, run.prefill[16, 1].as_text()))
    assert set(prefill) == {"all-reduce"}
    for program in (run.copy, *run.export.values(), *run.restore.values()):
        assert not re.findall(COLLECTIVES, program.as_text())


def test_each_device_reports_its_shares(two):
    (part,) = two.engine._executor.runtimes
    devices = two.memory().devices
    assert [device.device for device in devices] == [device.id for device in part.mesh.devices.flat]
    for device in devices:
        assert device.parts["weights"] == device_bytes(part.params)
        assert device.parts["kv_cache"] == device_bytes(part.pools)


def test_pools_are_updated_in_place_and_hold_own_heads(two):
    (part,) = two.engine._executor.runtimes
    pool = part.pools[0].data
    assert {shard.data.shape for shard in pool.addressable_shards} == {(TIGHT, 2, 2, 16, 8)}
    pools, microbatch = device_bytes(part.pools), two.engine._executor.microbatches[0]
    for program in (part.run.prefill[64, 1], *part.run.restore.values(), part.run.copy):
        assert program.memory_analysis().alias_size_in_bytes == pools
    kept = pools + device_bytes((microbatch.last_tokens, microbatch.sampler))
    assert part.run.widest_decode.memory_analysis().alias_size_in_bytes == kept


def test_the_plan_is_what_a_device_holds(two):
    config = EngineConfig(**SETTINGS, num_pages=TIGHT, tensor_parallel_size=2)
    needs = plan_engine(two.model, config, "cpu").needs
    (part,) = two.engine._executor.runtimes
    held = collections.Counter()
    for array in jax.tree.leaves(part.params):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert set(held.values()) == {needs.weights}
    assert len(held) == 2
    given = two.model.params
    assert not _held(two.model, given, make_mesh(2))  # parameters on one device will move
    assert _held(two.model, part.params, make_mesh(2)) == held
    assert needs.page * TIGHT == device_bytes([pool.data for pool in part.pools])


@pytest.mark.parametrize("name", ["groups", "few KV heads", "odd vocabulary"])
def test_weights_are_loaded_where_they_stay(name, tmp_path):
    model, mesh = model_of(name), make_mesh(4)
    changes = {**SHAPE, **SHAPES[name]}
    save_params(tmp_path, model.params, model.specs, llama_json(**changes))
    spread = shardable_model(model, mesh)
    specs = spread.specs

    def place(path: Path, spec: ParamSpec, fill: Fill) -> jax.Array:
        del path
        return on_devices(param_sharding(mesh, spec), spec, fill)

    loaded = load_params(tmp_path, specs, "float32", place)
    for got, expected in zip(jax.tree.leaves(loaded), jax.tree.leaves(place_params(spread, mesh)), strict=True):
        assert got.sharding == expected.sharding
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
    save_params(tmp_path / "again", loaded, specs, llama_json(**changes))
    again = (tmp_path / "again" / "model.safetensors").read_bytes()
    assert again == (tmp_path / "model.safetensors").read_bytes()


def test_a_folder_is_loaded_onto_the_mesh():
    mesh = make_mesh(2)
    one, two = load_model("demo-draft", show_progress=False), load_model("demo-draft", show_progress=False, mesh=mesh)
    assert RULES["kv_heads"] in two.params["layers_0"]["attention"]["qkv"].sharding.spec
    for got, want in zip(jax.tree.leaves(two.params), jax.tree.leaves(one.params), strict=True):
        assert set(got.sharding.device_set) == set(mesh.devices.flat)
        np.testing.assert_array_equal(np.float32(got), np.float32(want))


REFUSED = {
    "tensor_parallel_size = 16 needs 16 devices, and there are 8": (16, {}),
    "neither divides the model's 3 KV heads nor": (2, {"num_attention_heads": 6, "num_key_value_heads": 3}),
    "6 query heads to a KV head, which 4 devices cannot share": (
        4,
        {"num_attention_heads": 6, "num_key_value_heads": 1},
    ),
    "4 devices do not divide the 98 mlp of layers_0/mlp/gate_up": (4, {"intermediate_size": 98}),
    "tensor_parallel_size = -1 must be at least 1": (-1, {}),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_impossible_sums_are_refused_with_the_arithmetic(sentence):
    tensor, changes = REFUSED[sentence]
    with pytest.raises(EngineConfigError, match=sentence):
        spread_llm(model_of(**{"hidden_size": 48, **changes}), tensor)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "name"), [(2, "groups"), (4, "few KV heads"), (8, "tied, odd vocabulary")])
@pytest.mark.parametrize("mode", ["swapped", "recomputed"])
def test_200_requests_have_the_tokens_of_one_device(tensor, name, mode, monkeypatch):
    same_tokens_of_200(model_of(name), mode, monkeypatch, tensor_parallel_size=tensor)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"num_pages": TIGHT}, {"multi_step": 4}, {"speculative": "ngram"}])
def test_bits_do_not_depend_on_what_else_is_served(changes):
    model = model_of("few KV heads")
    requests = make_requests(40, model.config.vocab_size)
    settings = {**SETTINGS, "tensor_parallel_size": 4}
    want = alone(model, requests, **settings)
    llm = LLM(model, **{**settings, "num_pages": ROOMY, **changes})
    assert run(llm, requests) == want
    assert run(llm, requests[::-1])[::-1] == want


@pytest.mark.slow
def test_a_folder_is_served_by_two_devices():
    one, two = (LLM("demo-draft", tensor_parallel_size=n, **SETTINGS) for n in (1, 2))
    params = SamplingParams(temperature=0.0, max_tokens=24)
    prompts = ["ROMEO:", "What shall we do"]
    assert [x.outputs[0].text for x in two.generate(prompts, params)] == [
        x.outputs[0].text for x in one.generate(prompts, params)
    ]
