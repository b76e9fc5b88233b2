"""Platform defaults of engine settings that the user leaves unset, within the bounds of the set ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.config import EngineConfig, EngineConfigError, ResolvedEngine, resolve
from jaxinfer.config.defaults import CPU, Defaults, of_platform
from jaxinfer.types import CacheSpec, LayerSpec, StateSpec

GIB = 1 << 30
CACHE = CacheSpec((LayerSpec(),) * 2, kv_heads=8, head_dim=128)
RECURRENT = LayerSpec(attends=False, states=(StateSpec((512, 1024)),))  # 1 MB of state per sequence
STATEFUL = CacheSpec((LayerSpec(), *(RECURRENT,) * 80), kv_heads=8, head_dim=128)


def resolved(defaults: Defaults = CPU, cache: CacheSpec = CACHE, **settings: Any) -> ResolvedEngine:
    return resolve(EngineConfig(**settings), cache, max_position=8192, itemsize=2, defaults=defaults)


def test_a_cpu_has_few_rows_and_small_chunks() -> None:
    engine = resolved()
    assert (engine.max_num_seqs, engine.prefill_sizes, engine.max_prefill_rows) == (8, (32, 128, 256), 512)
    assert (engine.rows, engine.max_num_batched_tokens) == (8, 2048)


def test_a_gpu_fills_itself() -> None:
    engine = resolved(of_platform("gpu", 60 * GIB))
    assert (engine.max_num_seqs, engine.prefill_sizes) == (256, (128, 256, 512, 1024, 2048))
    assert engine.prefill_batch_sizes[-1] * engine.prefill_sizes[-1] == 4096
    assert engine.max_num_batched_tokens >= 4096


def test_an_h200_has_the_defaults_of_an_h100() -> None:
    """Both have the same defaults at three quarters of 139 and of 79 GiB, the share that JAX takes by default."""
    assert of_platform("gpu", 104 * GIB)._replace(memory=0) == of_platform("gpu", 59 * GIB)._replace(memory=0)


@pytest.mark.parametrize(("memory", "sequences", "largest"), [(60, 256, 2048), (30, 128, 1024), (12, 64, 512)])
def test_a_smaller_gpu_takes_less_at_once(memory: int, sequences: int, largest: int) -> None:
    engine = resolved(of_platform("gpu", memory * GIB))
    assert (engine.max_num_seqs, engine.prefill_sizes[-1]) == (sequences, largest)


def test_memory_that_nobody_knows_is_taken_for_enough() -> None:
    assert of_platform("gpu")._replace(memory=1) == of_platform("gpu", 80 * GIB)._replace(memory=1)


def test_states_leave_room_for_all_else() -> None:
    engine = resolved(of_platform("gpu", 60 * GIB), STATEFUL)
    states = engine.num_states * STATEFUL.bytes_per_state(2)
    assert engine.max_num_seqs < 256
    assert 60 * GIB // 8 < states <= 60 * GIB // 4
    assert resolved(of_platform("gpu", 60 * GIB), STATEFUL, num_states=2000).max_num_seqs == 256
    assert resolved(cache=STATEFUL).max_num_seqs == 8


def test_no_chunk_is_larger_than_a_prompt_needs() -> None:
    assert resolved(of_platform("gpu"), max_model_len=300).prefill_sizes == (128, 256, 512)
    assert resolved(max_model_len=128).prefill_sizes == (32, 128)


def test_what_was_given_stays() -> None:
    given_settings = {"max_num_seqs": 3, "prefill_sizes": (64,), "max_prefill_rows": 1, "max_num_batched_tokens": 100}
    engine = resolved(of_platform("gpu"), **given_settings)
    assert {name: getattr(engine, name) for name in given_settings} == given_settings


@given(
    gpu=st.sampled_from([0, 12, 30, 60, None]),
    page=st.sampled_from([1, 16, 64, 512]),
    length=st.integers(2, 8192),
    budget=st.none() | st.integers(1, 5000),
    sequences=st.none() | st.integers(1, 300),
    sizes=st.none() | st.sampled_from([(16,), (64, 512), (2048,)]),
    devices=st.sampled_from([1, 2, 8]),
)
def test_what_is_chosen_fits_what_was_given_or_that_is_refused_by_name(
    gpu: int | None, page: int, length: int, devices: int, budget: int | None, sequences: int | None, sizes: Any
) -> None:
    config = EngineConfig(
        page_size=page,
        max_model_len=length,
        max_num_batched_tokens=budget,
        max_num_seqs=sequences,
        prefill_sizes=sizes,
        tensor_parallel_size=devices,
        sequence_parallel_norms=devices > 1,
    )
    defaults = CPU if gpu is None else of_platform("gpu", gpu * GIB)
    try:
        engine = resolve(config, CACHE, max_position=8192, itemsize=2, defaults=defaults)
    except EngineConfigError:
        assert budget is not None or sizes is not None  # defaults alone are never rejected
        return
    assert engine.prefill_sizes[-1] + engine.max_num_seqs <= engine.max_num_batched_tokens
    assert engine.prefill_sizes[-1] % page == 0
    assert all(size % devices == 0 for size in engine.prefill_sizes)
    asked = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    assert all(getattr(engine, name) == value for name, value in asked.items())


def test_the_hosts_memory_holds_the_pages_of_every_device() -> None:
    """Host pages count the heads of every device separately, and every replica of latents."""
    heads = CacheSpec((LayerSpec(),) * 2, kv_heads=4, head_dim=16)
    latents = CacheSpec((LayerSpec(latent_rank=96),) * 2, kv_heads=1, head_dim=128)
    found = {}
    for name, spec in (("heads", heads), ("latents", latents)):
        for devices in (1, 2):
            config = EngineConfig(page_size=16, swap_space_gib=2**-10, tensor_parallel_size=devices)
            found[name, devices] = resolve(config, spec, max_position=128, itemsize=2).host_pages
    page = 2 * 16 * 128 * 2
    assert found["heads", 1] == found["heads", 2] == found["latents", 1] == 2**20 // page
    assert found["latents", 2] == 2**20 // (2 * page)
