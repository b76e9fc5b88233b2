"""Sizing of the KV pool: the sum, its error message, and the memory of devices."""

import dataclasses
import functools

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.config import EngineConfigError
from jaxinfer.planner.memory import Budget, HostWeights, Needs, Ways, available_memory, device_budget, plan_memory

GIB, MIB = 2**30, 2**20
WAYS = Ways(page_size=16)


def test_what_does_not_fit_is_said_with_the_sum():
    needs = Needs(weights=15 * GIB, sampler=0, page=16 * MIB, temporaries=int(0.4 * GIB))
    with pytest.raises(EngineConfigError) as refused:
        plan_memory(needs, Budget(16 * GIB, 0.9), length=8192, width=64, asked=None, most=1000, ways=WAYS)
    assert str(refused.value) == (
        "weights 15.0 GiB + temporaries 0.4 GiB + 1 sequence of 8192 tokens (64 pages) 1.0 GiB = 16.4 GiB > "
        "0.9 x 16.0 GiB (memory_utilization): no setting makes it fit: take a smaller model, or "
        "quantise it (jaxinfer convert --quantize int8)"
    )


def test_the_sum_names_the_pages_asked_for_and_what_others_use():
    needs = Needs(weights=3 * MIB, sampler=GIB, page=2 * MIB, temporaries=None)
    with pytest.raises(EngineConfigError) as refused:
        plan_memory(needs, Budget(4 * GIB, 0.5, used=GIB), length=100, width=2, asked=3, most=10, ways=WAYS)
    assert str(refused.value) == (
        "weights 3.0 MiB + sampler state 1.0 GiB + num_pages = 3 6.0 MiB = 1.0 GiB > "
        "0.5 x 4.0 GiB - 1.0 GiB in use (memory_utilization): it fits with memory_utilization = 0.51"
    )


@pytest.mark.parametrize(
    ("room", "asked", "offered"),
    [
        (80, None, "max_model_len = 5120, kv_cache_dtype = int8 or tensor_parallel_size = 2"),
        (60, None, "max_model_len = 3840 or tensor_parallel_size = 2"),
        (-30, None, "tensor_parallel_size = 4"),
        (-60, None, "tensor_parallel_size = 8"),
        (127, 200, "kv_cache_dtype = int8 or tensor_parallel_size = 2"),
        (130, 200, "num_pages left open, kv_cache_dtype = int8 or tensor_parallel_size = 2"),
    ],
)
def test_what_does_not_fit_is_told_the_ways_out(room, asked, offered):
    """Errors name the settings that fit. Weights take 100 MiB; a sequence needs 128 pages of 1 MiB."""
    needs, ways = Needs(100 * MIB, 0, MIB, temporaries=0), Ways(64, 5 * MIB // 8, (2, 4, 8))
    budget = Budget((100 + room) * MIB, 1.0)
    with pytest.raises(EngineConfigError) as refused:
        plan_memory(needs, budget, length=8192, width=128, asked=asked, most=1000, ways=ways)
    assert str(refused.value).endswith(f": it fits with {offered}")


def test_what_copies_cost():
    host = HostWeights((10, 30, 20, 5))
    assert (host.bytes, host.buffers, host.seconds(130.0)) == (65, 50, 0.5)
    assert (HostWeights().buffers, HostWeights((7,)).buffers) == (0, 7)
    assert "GB/s" in host.text(1e9)
    assert "GB/s" not in host.text()


@pytest.mark.parametrize(("layers", "offered"), [((40, 60), False), ((40, 40, 60), False), ((20,) * 8, True)])
def test_weights_in_host_memory_are_offered_where_they_are_enough(layers, offered):
    """50 MiB are missing, and two layers need room as well."""
    needs, ways = Needs(160 * MIB, 0, MIB, temporaries=0), Ways(64, layers=HostWeights(tuple(n * MIB for n in layers)))
    with pytest.raises(EngineConfigError) as refused:
        plan_memory(needs, Budget(120 * MIB, 1.0), length=640, width=10, asked=None, most=1000, ways=ways)
    assert ("weight_offload_gib = 0.1" in str(refused.value)) is offered


sizes = st.integers(0, 10_000)


@given(sizes, sizes, sizes, st.integers(1, 500), st.integers(1, 20_000), st.integers(1, 50), st.integers(1, 300))
def test_the_pool_takes_what_is_left_and_no_more(weights, sampler, temporaries, page, total, width, most):
    needs, budget = Needs(weights, sampler, page, temporaries), Budget(total, 1.0)
    plan = functools.partial(plan_memory, needs, budget, length=width, width=width, most=most, ways=WAYS)
    fixed = weights + sampler + temporaries
    if fixed + width * page > total:
        with pytest.raises(EngineConfigError):
            plan(asked=None)
        return
    pages = plan(asked=None).pages
    assert pages >= width
    assert fixed + pages * page <= total
    assert pages in (width, most) or fixed + (pages + 1) * page > total
    assert plan(asked=width).pages == width


def test_programs_that_need_more_than_the_rest_are_refused_once_that_is_known():
    needs = Needs(weights=50, sampler=0, page=10)
    plan = plan_memory(needs, Budget(100, 1.0), length=1, width=1, asked=None, most=4, ways=WAYS)
    assert plan.pages == 4
    plan.require(lambda: 10)
    with pytest.raises(EngineConfigError, match=r"temporaries .* a pool of 4 pages"):
        plan.require(lambda: 11)
    needs = dataclasses.replace(needs, temporaries=1)
    known = plan_memory(needs, Budget(100, 1.0), length=1, width=1, asked=4, most=4, ways=WAYS)
    known.require(lambda: 1000)  # the temporaries of the plan are used, not the callback


# ---- devices


class Device:
    def __init__(self, stats):
        self._stats = stats

    def memory_stats(self):
        return self._stats


def test_a_gpu_offers_its_limit_less_what_others_use():
    budget = device_budget(Device({"bytes_limit": 1000, "bytes_in_use": 300}), 0.9, held=200)
    assert (budget.total, budget.used, budget.bytes) == (1000, 100, 800)


def test_a_cpu_offers_what_the_machine_has():
    budget = device_budget(jax.devices("cpu")[0], 0.5, held=0)
    assert 0 < budget.bytes < budget.total
    assert budget.used == 0


def test_available_memory_is_bounded_by_a_containers_limit(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:   9000 kB\nMemAvailable:   5000 kB\n")
    assert available_memory(tmp_path, tmp_path) == 5000 * 1024
    limit = tmp_path / "fs" / "cgroup" / "memory.max"
    limit.parent.mkdir(parents=True)
    limit.write_text("max\n")
    assert available_memory(tmp_path, tmp_path) == 5000 * 1024
    limit.write_text("1000000\n")
    assert available_memory(tmp_path, tmp_path) == 1000000
    assert available_memory(tmp_path / "nothing", tmp_path) == 1000000
