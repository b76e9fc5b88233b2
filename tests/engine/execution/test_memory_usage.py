"""Tests of the memory that an engine reports: each array once, on its device, by its part."""

import jax
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.execution import memory
from jaxinfer.engine.execution.memory import plan_engine
from jaxinfer.llm import LLM
from jaxinfer.parallel.arrays import device_bytes
from jaxinfer.parallel.driver import DriverFigures
from jaxinfer.sampling_params import SamplingParams
from tests.fakes import random_head, random_model

SETTINGS = {"max_model_len": 64, "max_num_seqs": 2, "page_size": 8, "num_pages": 12, "prefill_sizes": (16,)}


@pytest.fixture(scope="module")
def llm():
    return LLM(random_model(num_hidden_layers=1), **SETTINGS)


def parts_of(llm):
    (device,) = llm.memory().devices
    return device.parts


def test_parts_are_those_of_the_plan(llm):
    needs = plan_engine(llm.model, EngineConfig(**SETTINGS), "cpu").needs
    parts = parts_of(llm)
    assert parts["weights"] == needs.weights == device_bytes(llm.model.params)
    assert parts["kv_cache"] == 12 * needs.page
    assert parts["temporaries"] == llm.engine.temporaries() > 0
    assert parts["slots"] >= needs.sampler > 0  # and what requests ask for
    assert parts.keys() == {"weights", "kv_cache", "slots", "temporaries"}


def test_on_a_cpu_nothing_is_measured_and_nothing_made_up(llm):
    (device,) = llm.memory().devices
    assert (device.process, device.device, device.kind) == (0, jax.devices()[0].id, "cpu")
    assert (device.in_use, device.peak, device.limit, device.driver) == (None,) * 4


def test_devices_are_busy_while_there_are_steps(llm):
    before = llm.memory()
    assert 0 <= before.devices[0].busy_seconds < before.seconds
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True))
    after, again = llm.memory(), llm.memory()
    worked = after.devices[0].busy_seconds - before.devices[0].busy_seconds
    assert 0 < worked < after.seconds - before.seconds
    assert again.devices[0].busy_seconds == after.devices[0].busy_seconds  # nothing is in flight
    assert again.seconds > after.seconds


def test_what_is_asleep_has_no_memory(llm):
    before, hosted = parts_of(llm), llm.memory().hosts[0].parts.get("kv_pages")
    assert hosted  # pages that were moved when costs were measured
    llm.served.sleep(1)
    assert parts_of(llm) == {name: before[name] for name in ("slots", "temporaries")}
    assert llm.memory().hosts[0].parts == {}
    llm.served.wake_up()
    assert parts_of(llm) == before


def test_weights_that_a_head_shares_count_once():
    model, settings = random_model(num_hidden_layers=4), {**SETTINGS, "num_speculative_tokens": 2}
    head = random_head("eagle3", model)
    drafting = LLM(model.replace(draft=head), **settings, speculative="eagle3")
    (runtime,) = drafting.engine._executor.drafting
    shared = dict(runtime.stage.model.config.shares)
    assert shared
    own = {name: node for name, node in runtime.params.items() if name not in shared}
    parts = parts_of(drafting)
    assert parts["weights"] == device_bytes(model.params) + device_bytes(own)
    assert (
        parts["weights"]
        == plan_engine(drafting.model, EngineConfig(**settings, speculative="eagle3"), "cpu").needs.weights
    )


def test_what_jax_and_the_driver_report_is_passed_on(llm, monkeypatch):
    class Gpu:
        platform, process_index, id, device_kind = "gpu", 1, 9, "NVIDIA H200"

        def memory_stats(self):
            return {"bytes_in_use": 5, "peak_bytes_in_use": 7, "bytes_limit": 11}

    figures = DriverFigures(watts=300.0)
    monkeypatch.setattr(memory, "driver_figures", lambda device: figures)
    found = memory._device(Gpu(), {"weights": 3})
    assert (found.process, found.device, found.kind, found.parts) == (1, 9, "NVIDIA H200", {"weights": 3})
    assert (found.in_use, found.peak, found.limit, found.driver) == (5, 7, 11, figures)


def test_arrays_in_host_memory_are_the_hosts():
    device = jax.devices()[0]
    place = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    here, there = jax.numpy.zeros(8), jax.device_put(jax.numpy.zeros(16), place)
    found = memory.measure([memory.Kept([device], {"a": here, "b": there})])
    assert found.devices[0].parts == {"weights": 32}
    assert found.hosts[0].parts == {"weights": 64}
