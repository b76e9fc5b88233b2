"""Weights in host memory: the choice of layers, the memory plan, and an engine that serves them."""

import dataclasses
import logging

import flax.linen as nn
import jax
import pytest

from jaxinfer.config import EngineConfig, EngineConfigError, check
from jaxinfer.engine.execution import memory
from jaxinfer.engine.execution.memory import plan_engine
from jaxinfer.engine.execution.placement import by_layers, host_weights, offloaded
from jaxinfer.llm import LLM
from jaxinfer.loading import load_model
from jaxinfer.models.model import abstract
from jaxinfer.parallel.arrays import device_bytes, is_page_locked
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.planner.memory import Budget, HostWeights, MemoryPlan
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import walk_specs
from tests.fakes import llama_json, random_model
from tests.models.test_sparse import FAMILIES

GIB, MIB = 2**30, 2**20
SETTINGS = {
    "max_num_seqs": 3,
    "max_model_len": 160,
    "page_size": 16,
    "prefill_sizes": (16, 64),
    "num_pages": 60,
}
PROMPTS = [[(7 * number + place * place) % 97 for place in range(5 + 20 * number)] for number in range(3)]
ALL = 100.0  # GiB


def generated(llm):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=10, ignore_eos=True, logprobs=2)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in llm.generate(PROMPTS, params)]


def params_of(llm):
    return llm.engine._executor.runtimes[0].params


def hosted(model):
    """Return the layers with weights in host memory, and which of these are experts."""
    found = {(path[0], "expert" in spec.axes) for path, spec in walk_specs(model.specs) if spec.on_host}
    return sorted(found)


def layer_gib(layers):
    """Return the GiB of the matrices of some layers of `random_model`."""
    model = random_model()
    leaves = jax.tree.leaves([model.params[f"layers_{index}"] for index in range(layers)])
    return sum(leaf.nbytes for leaf in leaves if leaf.ndim > 1) / GIB


@pytest.mark.parametrize("gib", [0.0, ALL])
def test_parameters_keep_their_order(gib):
    """Parts of adapters are numbered by it."""
    model = random_model()
    paths = [path for path, _ in walk_specs(model.specs)]
    assert [path for path, _ in walk_specs(offloaded(model, gib, make_mesh(1)).specs)] == paths != sorted(paths)


@pytest.mark.parametrize(
    ("gib", "expected"),
    [
        (0.0, []),
        (1e-9, [3]),
        (layer_gib(2), [1, 4]),
        (layer_gib(2) + 1e-9, [1, 3, 5]),
        (ALL, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_as_few_layers_as_are_enough_are_spaced_evenly(gib, expected):
    model = offloaded(random_model(num_hidden_layers=6), gib, make_mesh())
    assert hosted(model) == [(f"layers_{index}", False) for index in expected]
    on_host = [is_page_locked(leaf.sharding) for leaf in jax.tree.leaves(model.params)]
    assert on_host == [spec.on_host for spec in jax.tree.leaves(model.specs)]


def test_experts_come_first():
    model = abstract(llama_json(**FAMILIES["mixtral"], num_hidden_layers=4), "float32")
    some, every = (hosted(offloaded(model, gib, make_mesh())) for gib in (1e-9, ALL))
    assert some == [("layers_2", True)]
    assert every == [(f"layers_{index}", experts) for index in range(4) for experts in (False, True)]


def test_without_the_setting_a_model_is_as_it_was():
    model = random_model()
    back = offloaded(offloaded(model, ALL, make_mesh()), 0.0, make_mesh())
    assert back.specs == model.specs
    assert not any(is_page_locked(leaf.sharding) for leaf in jax.tree.leaves(back.params))


def test_weights_are_transformed_on_the_device_and_kept_on_the_host():
    model = offloaded(random_model(num_hidden_layers=2), ALL, make_mesh())

    def doubled(part):
        assert not any(is_page_locked(leaf.sharding) for leaf in jax.tree.leaves(part.params))
        return part.replace(params={**part.params, **{name: twice(node) for name, node in part.params.items()}})

    def twice(node):
        return {**node, "mlp": jax.tree.map(lambda leaf: 2 * leaf, node["mlp"])} if "mlp" in node else node

    made = by_layers(model, doubled)
    kept, given = made.params["layers_1"], model.params["layers_1"]
    assert [is_page_locked(leaf.sharding) for leaf in jax.tree.leaves(kept)] == [
        is_page_locked(leaf.sharding) for leaf in jax.tree.leaves(given)
    ]
    assert kept["attention"]["qkv"] is given["attention"]["qkv"]
    assert (kept["mlp"]["down"] == 2 * given["mlp"]["down"]).all()


def limited(monkeypatch, total):
    monkeypatch.setattr(memory, "device_budget", lambda device, utilization, *_: Budget(total, utilization))


@pytest.mark.slow
def test_a_model_of_twice_the_memory_generates_the_same_tokens(monkeypatch, caplog):
    sizes = {"hidden_size": 64, "intermediate_size": 384, "num_key_value_heads": 1, "num_hidden_layers": 6}
    model, settings = random_model(**sizes), {**SETTINGS, "max_model_len": 64, "prefill_sizes": (16,), "num_pages": 10}
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    expected = generated(LLM(model, **settings))
    limited(monkeypatch, whole // 2)
    monkeypatch.setattr(memory, "_temporaries", lambda *_: 0)  # XLA:CPU has none for the copies
    monkeypatch.setattr(MemoryPlan, "require", lambda *_: None)
    with pytest.raises(EngineConfigError, match=r"^weights .*memory_utilization"):
        LLM(model, **settings, memory_utilization=1.0)
    with caplog.at_level(logging.INFO, "jaxinfer.start"):
        llm = LLM(model, **settings, memory_utilization=1.0, weight_offload_gib=ALL)
    placed = params_of(llm)
    pools = device_bytes(llm.engine._executor.runtimes[0].pools)
    buffers = host_weights(placed).buffers
    assert device_bytes(placed) + pools + buffers < whole // 2
    assert device_bytes(placed) + device_bytes(placed, page_locked=True) == whole
    assert any("in host memory" in message for message in caplog.messages)
    assert generated(llm) == expected


def test_the_plan_counts_what_is_on_the_device_and_the_buffers():
    model, config = random_model(num_hidden_layers=4), EngineConfig(max_num_seqs=2, max_model_len=128)
    plain = plan_engine(model, config, "cpu").needs
    needs = plan_engine(model, dataclasses.replace(config, weight_offload_gib=ALL), "cpu").needs
    (layer,) = set(needs.host.layers)
    assert len(needs.host.layers) == 4
    assert needs.weights == plain.weights - 4 * layer
    assert needs.host.buffers == needs.running == 2 * layer
    assert plain.host == HostWeights()
    assert needs.fixed == plain.fixed - 2 * layer


def test_what_does_not_fit_a_gpu_is_told_of_the_host(monkeypatch):
    model = random_model(num_hidden_layers=8)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    monkeypatch.setattr(memory, "_temporaries", lambda *_: 0)
    limited(monkeypatch, int(1.5 * whole))
    config = EngineConfig(max_num_seqs=2, max_model_len=256, num_pages=16, page_size=16)
    with pytest.raises(EngineConfigError) as refused:
        plan_engine(model, config, "gpu")
    assert "weight_offload_gib = 0.1" in str(refused.value)
    assert plan_engine(model, dataclasses.replace(config, weight_offload_gib=0.1), "gpu").pages == 16


def test_layers_of_a_folder_are_read_into_host_memory():
    model = load_model("demo", show_progress=False, weight_offload_gib=ALL)
    assert hosted(model)
    placed = [is_page_locked(leaf.sharding) for leaf in jax.tree.leaves(model.params)]
    assert placed == [spec.on_host for spec in jax.tree.leaves(model.specs)]


def test_settings_that_cannot_be_are_rejected_by_name(monkeypatch):
    for changes in (
        {"weight_offload_gib": -1.0},
        {"weight_offload_gib": float("inf")},
        {"weight_offload_gib": 1.0, "enable_dp_attention": True, "expert_parallel_size": 2},
    ):
        with pytest.raises(EngineConfigError, match=r"^weight_offload_gib = "):
            check(EngineConfig(**changes))
    model = random_model()
    with pytest.raises(EngineConfigError, match=r"^weight_offload_gib = 1 cannot be: .*Decoder"):
        offloaded(model.replace(module=nn.Dense(1)), 1.0, make_mesh())
    config = EngineConfig(max_num_seqs=2, max_model_len=128, weight_offload_gib=ALL)
    monkeypatch.setattr(memory, "available_memory", lambda: 1)
    with pytest.raises(EngineConfigError, match=r"^weight_offload_gib = 100 cannot be: .*host memory"):
        plan_engine(model, config, "cpu")


def test_the_host_must_lock_pages_and_weights(monkeypatch):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "1")
    monkeypatch.setattr(memory, "_temporaries", lambda *_: 0)
    limited(monkeypatch, GIB)
    config = EngineConfig(max_num_seqs=2, max_model_len=128, weight_offload_gib=ALL, swap_space_gib=0.9)
    with pytest.raises(EngineConfigError, match="weight_offload_gib"):
        plan_engine(abstract(llama_json(), "float32"), config, "gpu")


DRAFTED = {"speculative": "draft_model", "num_speculative_tokens": 3}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"multi_step": 4}, DRAFTED, {"speculative": "ngram"}, {"enable_lora": True}, {"kv_cache_dtype": "int8"}],
    ids=str,
)
def test_every_kind_of_engine_has_the_bits_of_weights_on_the_device(dtype, changes):
    model = random_model(dtype).replace(draft=random_model(dtype, seed=1, num_hidden_layers=1))
    some = {**SETTINGS, **changes}
    llm = LLM(model, **some, weight_offload_gib=ALL)
    assert device_bytes(params_of(llm), page_locked=True) > 0
    assert generated(llm) == generated(LLM(model, **some))


@pytest.mark.slow
def test_weights_change_and_sleep_in_host_memory():
    model, other = random_model(), random_model(seed=5)
    llm, plain = (LLM(model, **SETTINGS, weight_offload_gib=gib) for gib in (ALL, 0.0))
    before, there = generated(llm), device_bytes(params_of(llm), page_locked=True)
    llm.sleep()
    llm.wake_up()
    assert (generated(llm), device_bytes(params_of(llm), page_locked=True)) == (before, there)
    assert llm.weight_checksums() == plain.weight_checksums()
    for each in (llm, plain):
        each.update_weights(other.params)
    assert generated(llm) == generated(plain) != before
    assert device_bytes(params_of(llm), page_locked=True) == there
    assert llm.weight_checksums() == plain.weight_checksums()
