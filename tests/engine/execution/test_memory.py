"""Sizing of the KV pool of models, and the memory that JAX reports for programs."""

import dataclasses
import json
import re

import jax
import pytest

from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.engine.execution import memory
from jaxinfer.engine.execution.memory import plan_engine
from jaxinfer.engine.execution.prepare import resolve_for
from jaxinfer.gpu_check.llama import LLAMA_8B
from jaxinfer.llm import LLM
from jaxinfer.loading import abstract_model, load_model
from jaxinfer.models.model import Model, abstract
from jaxinfer.planner.memory import Budget
from jaxinfer.sampling_params import SamplingParams
from pallas_kernels.check.target import DEVICES
from tests.fakes import llama_json, random_model

GIB, MIB = 2**30, 2**20
CONFIG = EngineConfig(max_num_seqs=2, max_model_len=128, prefill_sizes=(16,), page_size=16)


def tiny_model(dtype: str = "float32") -> Model:
    return random_model(dtype, num_hidden_layers=1)


def test_an_abstract_model_has_the_shapes_of_the_loaded_one():
    for dtype in ("auto", "bfloat16"):
        abstract, loaded = abstract_model("demo-draft", dtype), load_model("demo-draft", dtype, show_progress=False)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract.params) == jax.tree.map(
            lambda x: (x.shape, x.dtype), loaded.params
        )
        assert abstract.cache_spec == loaded.cache_spec
        assert (abstract.module, abstract.config) == (loaded.module, loaded.config)


def with_budget(monkeypatch, total: int) -> None:
    monkeypatch.setattr(memory, "device_budget", lambda device, utilization, *_: Budget(total, utilization))


def test_an_accelerators_pool_takes_what_weights_and_programs_leave(monkeypatch):
    with_budget(monkeypatch, 64 * MIB)
    model = tiny_model()
    config = dataclasses.replace(CONFIG, max_num_seqs=8, prefill_sizes=(32, 128, 256), max_prefill_rows=512)
    plan = plan_engine(model, config, "gpu")
    llm = LLM(model, config=config, num_pages=plan.pages, compilation_cache_dir="")
    assert plan.needs.temporaries == llm.engine.temporaries() > 0
    assert llm.engine.config.prefill_batch_sizes[0] > 1
    assert plan.needs.weights == sum(x.nbytes for x in jax.tree.leaves(model.params))
    assert plan.pages == (int(64 * MIB * 0.9) - plan.needs.fixed) // plan.needs.page
    assert plan.pages > 2 * 8  # more than all rows can fill: the rest is prefix cache


@pytest.mark.parametrize(
    ("device", "share", "pages"), [("h100", 0.92, 6_100), ("h200", 0.92, 12_300), ("h200", 0.75, 9_600)]
)
def test_the_pool_of_an_8b_fills_a_described_gpu(monkeypatch, caplog, device, share, pages):
    """The pool fills JAX's share of the GPU memory; a pool of 16-bit values stays below the range of 32-bit offsets."""
    plan = plan_for_8b(monkeypatch, device, share)
    assert pages < plan.pages < 1.1 * pages
    assert plan.needs.weights == pytest.approx(16.06e9, rel=1e-3)
    assert plan.needs.page == 8 * MIB
    assert 0 <= plan.unused < plan.needs.page
    assert caplog.messages == []


def test_where_offsets_bound_the_pool_the_start_says_so(monkeypatch, caplog):
    """An H200 would hold more 8-bit pages of an 8B model than the limit of 2**31 - 1 elements per layer."""
    plan = plan_for_8b(monkeypatch, "h200", 0.92, kv_cache_dtype="fp8")
    elements = 2 * 8 * 64 * 128
    assert plan.pages * elements <= 2**31 - 1 < (plan.pages + 1) * elements
    (said,) = caplog.messages
    assert f"{plan.pages} pages" in said
    assert f"{plan.unused / GIB:.1f} GiB" in said
    assert 20 * GIB < plan.unused < 50 * GIB
    caplog.clear()
    plan_for_8b(monkeypatch, "h200", 0.92, kv_cache_dtype="fp8", kv_cache_bytes=16 * GIB)
    assert caplog.messages == []


def plan_for_8b(monkeypatch, device, share, **settings):
    total = int(re.search(r"device_memory_size: (\d+)", DEVICES[device].description)[1])
    with_budget(monkeypatch, int(total * share))
    monkeypatch.setattr(memory, "_temporaries", lambda *_: GIB)
    return plan_engine(abstract(LLAMA_8B, "bfloat16"), EngineConfig(**settings), "gpu")


def test_the_bytes_of_the_cache_can_be_bounded_on_an_accelerator(monkeypatch):
    with_budget(monkeypatch, 64 * MIB)
    monkeypatch.setattr(memory, "_temporaries", lambda *_: 1)
    plan = plan_engine(tiny_model(), dataclasses.replace(CONFIG, kv_cache_bytes=MIB), "gpu")
    assert plan.pages == MIB // plan.needs.page


def test_a_cpus_pool_is_bounded_and_compiles_nothing(monkeypatch):
    monkeypatch.setattr(memory, "compile_largest", None)
    plan = plan_engine(tiny_model(), CONFIG, "cpu")
    assert plan.pages == 2 * 128 // 16
    assert plan.needs.temporaries is None


def test_a_cpu_that_is_nearly_full_leaves_room_for_programs(monkeypatch):
    monkeypatch.setattr(memory, "_temporaries", lambda *_: 100_000)
    roomy = plan_engine(tiny_model(), CONFIG, "cpu").needs
    with_budget(monkeypatch, int((roomy.fixed + 100_000 + 10 * roomy.page) / 0.9) + 2)
    plan = plan_engine(tiny_model(), CONFIG, "cpu")
    assert (roomy.temporaries, plan.needs.temporaries) == (None, 100_000)
    assert plan.pages == 10


def test_a_model_that_cannot_fit_is_refused_before_its_weights_are_looked_for(tmp_path):
    config_json = llama_json(hidden_size=2**20, intermediate_size=2**22, num_hidden_layers=100)
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    with pytest.raises(EngineConfigError, match=r"weights \d+\.\d GiB .* = \d+\.\d GiB > 0.9 x .*memory_utilization"):
        LLM(str(tmp_path), "bfloat16", compilation_cache_dir="")


def test_settings_are_refused_before_the_weights_are_looked_for(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(llama_json()))
    with pytest.raises(EngineConfigError, match="max_model_len = 300 is beyond"):
        LLM(str(tmp_path), "bfloat16", max_model_len=300, compilation_cache_dir="")


@pytest.mark.parametrize(
    ("platform", "why"), [("cpu", "for GPUs, and this is a CPU"), ("gpu", r"head_dim 8: this kernel does \(64, ")]
)
def test_kernels_that_cannot_be_are_refused_before_anything_is_loaded(platform, why):
    with pytest.raises(EngineConfigError, match=f"attention_backend = mosaic cannot be: .*{why}"):
        resolve_for(tiny_model(), EngineConfig(attention_backend="mosaic"), platform)


@pytest.mark.gpu
def test_a_gpus_pool_is_filled_and_serves():
    model = random_model("bfloat16")
    llm = LLM(model, max_num_seqs=2, memory_utilization=0.5, compilation_cache_dir="")
    stats = jax.devices()[0].memory_stats()
    assert stats["bytes_in_use"] <= 0.5 * stats["bytes_limit"]
    assert stats["peak_bytes_in_use"] <= stats["bytes_limit"]
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))[0].outputs[0].finish_reason == "length"


def test_the_least_pool_holds_16_bit_pages_of_half_the_size():
    wide, narrow = (plan_engine(tiny_model(dtype), CONFIG, "cpu").needs.page for dtype in ("float32", "bfloat16"))
    assert wide == 2 * narrow == 2 * 2 * 2 * 16 * 8 * 4 // 2


def test_the_ways_out_lead_out(monkeypatch):
    """Each setting that the error suggests makes the plan fit, where memory holds the model and half a sequence."""
    model = random_model("float32", num_hidden_layers=1, max_position_embeddings=2048)
    config = dataclasses.replace(CONFIG, max_num_seqs=1, max_model_len=2048)
    needed = plan_engine(model, config, "cpu", None).needs
    monkeypatch.setattr(memory, "_temporaries", lambda *_: MIB // 16)
    total = needed.fixed + MIB // 16 + int(64.5 * needed.page)
    monkeypatch.setattr(memory, "device_budget", lambda *_: Budget(total, 1.0))
    with pytest.raises(EngineConfigError, match=r"temporaries 0\.1 MiB") as refused:
        plan_engine(model, config, "cpu", None)
    length = int(re.search(r"max_model_len = (\d+)", str(refused.value))[1])
    assert "kv_cache_dtype = int8" in str(refused.value)
    for change in ({"max_model_len": length}, {"kv_cache_dtype": "int8"}):
        assert plan_engine(model, dataclasses.replace(config, **change), "cpu", None).pages > 0
    with pytest.raises(EngineConfigError):
        plan_engine(model, dataclasses.replace(config, max_model_len=length + 16), "cpu", None)
