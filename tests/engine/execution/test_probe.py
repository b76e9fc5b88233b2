"""Substitution of compiled programs, and the probes that show that it changes no bit."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.execution.calibration import calibrate
from jaxinfer.engine.execution.commands import DecodeBatch, PrefillBatch
from jaxinfer.engine.execution.executor import LocalExecutor
from jaxinfer.engine.execution.prepare import prepare
from jaxinfer.engine.execution.probe import Probe, joint
from jaxinfer.engine.execution.step import unpack
from jaxinfer.kv.pool import LayerPool
from jaxinfer.llm import LLM
from jaxinfer.parallel.mesh import mesh_for
from jaxinfer.sampling_params import SamplingParams
from pallas_kernels.paged_attention import xla
from tests.engine.test_invariance import bits, prompts_of
from tests.fakes import random_model


def demo_engine(rows: int = 256) -> LLM:
    """Return the demo model, whose products of 64 rows and more agree on the machines that were measured."""
    return LLM("demo", "float32", max_num_seqs=4, max_model_len=300, prefill_sizes=(64, 128), max_prefill_rows=rows)


@pytest.mark.parametrize("rows", [1, 256])
def test_wide_programs_are_compiled_as_asked(rows):
    llm = LLM(random_model(), max_num_seqs=8, max_model_len=200, prefill_sizes=(16, 64), max_prefill_rows=rows)
    made = set(llm.engine._executor.runtimes[-1].run.prefill)
    assert made == {(16, 1), (64, 1)} | ({(16, 8), (64, 4)} if rows > 1 else set())


def test_prompts_together_give_the_bits_of_prompts_alone():
    wide, narrow = demo_engine(), demo_engine(rows=1)
    prompts = prompts_of([40, 64, 65, 130, 199, 50, 299, 17], wide.model.config.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    used = []
    for key, program in list(wide.engine._executor.runtimes[-1].run.prefill.items()):
        wide.engine._executor.runtimes[-1].run.prefill[key] = lambda *a, key=key, program=program: (
            used.append(key) or program(*a)
        )
    together = [bits(output) for output in wide.generate(prompts, params)]
    assert {count for _, count in used if count > 1}, "no chunks shared a program"
    assert together == [bits(narrow.generate([prompt], params)[0]) for prompt in prompts]


SPOILED_CHUNKS = [(None, {64: 4, 128: 2}), ((64, 4), {128: 2}), ((128, 2), {64: 4})]
SPOILED_CLASSES = [(None, {64: 0, 128: 0}), ((64, 1), {64: 0, 128: 1}), ((128, 1), {64: 0, 128: 1})]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return demo_engine().engine


@contextlib.contextmanager
def probe_with(engine: Engine, **changes: Any) -> Iterator[Probe]:
    """Yield a probe on an engine's programs, some of them replaced."""
    part, config, runner = engine._executor.runtimes[-1], engine.config, engine._runner
    run, spec, itemsize = part.run, part.stage.model.cache_spec, part.pools[0].data.dtype.itemsize
    per_token = spec.bytes_per_page(1, itemsize) // itemsize
    part.run = dataclasses.replace(run, **changes)
    try:
        yield Probe(engine._executor, config, runner._vocab, spec.windows, itemsize, per_token)
    finally:
        part.run = run


def nudged(pools: list[LayerPool], page: int, slot: int = 0) -> list[LayerPool]:
    """Return the pools with the last bit of one element of the last layer changed."""
    pool = pools[-1]
    data = jnp.nextafter(pool.data[page, 1, 0, slot, 0], jnp.inf)
    data = jax.device_put(pool.data.at[page, 1, 0, slot, 0].set(data), pool.data.sharding)
    return [*pools[:-1], pool._replace(data=data)]


def programs_of(engine: Engine) -> dict[tuple[int, int], Any]:
    return dict(engine._executor.runtimes[-1].run.prefill)


def chunks_of(packed: np.ndarray, size: int, count: int, engine: Engine) -> PrefillBatch:
    """Return the unpacked batch of a prefill program."""
    one, tables = np.zeros(count, np.int32), np.zeros((1, count, engine.config.table_width), np.int32)
    return unpack(packed, PrefillBatch(np.zeros((count, size), np.int32), one, one, tables))


def spoiled(engine: Engine, key: tuple[int, int] | None) -> dict[tuple[int, int], Any]:
    """Return the prefill programs, where program ``key`` gets a bit of its last chunk wrong."""
    programs = programs_of(engine)
    if key is not None:
        program = programs[key]

        def wrong(params, pools, packed, arriving):
            batch = chunks_of(packed, *key, engine)
            page = batch.tables[0, -1, batch.starts[-1] // engine.config.page_size]
            return nudged(program(params, pools, packed, arriving), int(page))

        programs[key] = wrong
    return programs


@pytest.mark.parametrize(("spoil", "proved"), SPOILED_CHUNKS)
def test_a_wide_program_with_other_bits_is_not_used(engine, spoil, proved):
    with probe_with(engine, prefill=spoiled(engine, spoil)) as probe:
        assert probe.prefill_batches() == proved


@pytest.mark.parametrize(("spoil", "classes"), SPOILED_CLASSES)
def test_sizes_with_other_bits_are_in_other_classes(engine, spoil, classes):
    with probe_with(engine, prefill=spoiled(engine, spoil)) as probe:
        assert probe.size_classes() == classes


def test_a_program_that_differs_within_a_piece_does_not_resume(engine):
    """The probe finds a program that is right for whole chunks and wrong for chunks that begin later."""
    program = programs_of(engine)[64, 1]

    def wrong(params, pools, packed, arriving):
        batch = chunks_of(packed, 64, 1, engine)
        pools, start = program(params, pools, packed, arriving), int(batch.starts[0])
        return nudged(pools, int(batch.tables[0, 0, start // 64])) if start % 64 else pools

    for prefill, resumes in [(programs_of(engine), True), ({**programs_of(engine), (64, 1): wrong}, False)]:
        with probe_with(engine, prefill=prefill) as probe:
            assert probe.exact_resume({64: 0, 128: 1}) is resumes


def test_a_model_that_shows_too_little_proves_nothing():
    """16-bit values of a tiny model hide real differences, so no programs are declared equivalent."""
    llm = LLM(random_model("bfloat16"), max_num_seqs=4, max_model_len=128, page_size=16, prefill_sizes=(8, 16))
    assert llm.engine.calibration.size_classes == {8: 0, 16: 1}
    assert not llm.engine.calibration.prefill_batches


def test_classes_are_not_looked_for_where_nothing_is_shared():
    settings = {"max_num_seqs": 2, "max_model_len": 128, "prefill_sizes": (64, 128)}
    for changes in ({"enable_prefix_caching": False}, {"exactness": "relaxed"}):
        assert LLM("demo", "float32", **settings, **changes).engine.calibration.size_classes == {64: 0, 128: 1}


# ---- decode rows in place of chunks


ALIKE = {"max_num_seqs": 16, "max_model_len": 128, "page_size": 16, "prefill_sizes": (16,), "max_prefill_rows": 1}


@pytest.fixture(scope="module")
def alike() -> Iterator[Engine]:
    """An engine whose products have 16 rows in both programs, and whose attention has blocks of one size."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(xla, "decode_block", lambda _: xla.PREFILL_BLOCK)
        yield LLM(random_model(), **ALIKE).engine


def decode_with(engine: Engine, wrong_from: int) -> Any:
    """Return ``decode`` with a wrong bit in the row at the last position, if that is ``wrong_from`` or later."""
    count = engine.config.rows
    decode, rows = engine._executor.runtimes[-1].run.decode[count], np.zeros(count, np.int32)
    like = DecodeBatch(rows, rows, rows, np.zeros((1, *rows.shape, engine.config.table_width), np.int32))

    def wrong(params, slots, state, packed, *operands):
        state, sampled = decode(params, slots, state, packed, *operands)
        batch, page = unpack(packed, like), engine.config.page_size
        row = int(np.argmax(batch.positions))
        if (last := int(batch.positions[row])) >= wrong_from:
            place = int(batch.tables[0, row, last // page])
            state = state._replace(pools=nudged(state.pools, place, last % page))
        return state, sampled

    return wrong


@pytest.mark.parametrize(("wrong_from", "agrees"), [(128, True), (64, False), (0, False)])
def test_decode_rows_stand_in_for_chunks_where_they_leave_the_same_bits(alike, wrong_from, agrees):
    assert alike.calibration.decode_agrees
    with probe_with(alike, decode={alike.config.rows: decode_with(alike, wrong_from)}) as probe:
        assert probe.decode_agrees({16: 0}) is agrees


def test_decode_rows_that_sum_blocks_of_other_sizes_do_not(engine):
    assert not engine.calibration.decode_agrees
    with probe_with(engine) as probe:
        assert not probe.decode_agrees({64: 0, 128: 0})


def test_whether_decode_rows_agree_is_not_asked(alike, engine):
    """The probe is skipped for sizes of several classes, programs that draft, and values that need too many rounds."""
    with probe_with(alike) as probe:
        assert not probe.decode_agrees({16: 0, 32: 1})
        assert probe.decode_tokens() == 128 + 2 * 16
        probe._engine = dataclasses.replace(alike.config, speculative="draft_model")
        assert not probe.decode_agrees({16: 0})
        probe._engine, probe._enough = alike.config, 10**9
        assert not probe.decode_agrees({16: 0})


# ---- several decode steps in one call


def several(engine: Engine, change: str) -> Any:
    """Return ``decode_many`` with an error in the field ``change``."""
    run, rows = engine._executor.runtimes[-1].run, np.zeros(engine.config.rows, np.int32)
    like = DecodeBatch(rows, rows, rows, np.zeros((1, *rows.shape, engine.config.table_width), np.int32))

    def wrong(params, slots, state, packed, steps):
        batch = unpack(packed, like)
        state, sampled, ran = run.decode_many[engine.config.rows](params, slots, state, packed, steps)
        if change == "pages":
            page, slot = divmod(int(batch.positions[1]), 16)
            state = state._replace(pools=nudged(state.pools, int(batch.tables[0, 1, page]), slot))
        if change == "logprobs":
            better = jnp.nextafter(sampled.logprobs.logprob, jnp.inf)
            sampled = sampled._replace(logprobs=sampled.logprobs._replace(logprob=better))
        if change == "tokens":
            sampled = sampled._replace(tokens=sampled.tokens.at[-1, 1].add(1))
        return state, sampled, ran

    return wrong


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_several_steps_are_used_where_they_give_the_bits_of_one(dtype):
    llm = LLM(random_model(dtype), max_num_seqs=3, max_model_len=64, page_size=16, prefill_sizes=(16,), multi_step=5)
    engine = llm.engine
    assert engine.calibration.multi_step == 5
    for change in ("nothing", "pages", "logprobs", "tokens"):
        with probe_with(engine, decode_many={engine.config.rows: several(engine, change)}) as probe:
            assert probe.multi_step(engine.limits, engine.config.decode_sizes) is (change == "nothing"), change


# ---- programs with adapters


def test_programs_with_adapters_must_have_equal_bits_as_well(monkeypatch):
    config = EngineConfig(
        max_num_seqs=8,
        max_model_len=128,
        page_size=16,
        prefill_sizes=(16, 32),
        max_prefill_rows=1,
        multi_step=3,
        structured_output_helpers=0,
        enable_lora=True,
        max_lora_rank=4,
    )
    prepared = prepare(random_model(), config, "cpu")
    monkeypatch.setattr(xla, "decode_block", lambda _: xla.PREFILL_BLOCK)
    executor = LocalExecutor(prepared, mesh_for(config))
    monkeypatch.setattr(executor, "digest", lambda: None)  # the results of an earlier start belong to other programs
    found = calibrate(executor, prepared, "cpu")
    assert (found.size_classes, found.decode_agrees, found.multi_step) == ({16: 0, 32: 0}, True, 3)
    (part,) = executor.runtimes
    whole, adapted = part.run, part.run.adapted
    assert adapted is not None

    def prefill(*operands):
        return nudged(adapted.prefill[32, 1](*operands), 0)

    def decode_many(*operands):
        state, *rest = adapted.decode_many[8](*operands)
        return state._replace(pools=nudged(state.pools, 0, 15)), *rest

    def decode(*operands):
        state, sampled = adapted.decode[8](*operands)
        return state._replace(pools=nudged(state.pools, 0)), sampled

    part.run = dataclasses.replace(whole, adapted=dataclasses.replace(adapted, decode={8: decode}))
    found = calibrate(executor, prepared, "cpu")
    assert (found.size_classes, found.decode_agrees) == ({16: 0, 32: 0}, False)
    part.run = dataclasses.replace(
        whole,
        adapted=dataclasses.replace(
            adapted, prefill={**adapted.prefill, (32, 1): prefill}, decode_many={8: decode_many}
        ),
    )
    found = calibrate(executor, prepared, "cpu")
    assert (found.size_classes, found.multi_step) == ({16: 0, 32: 1}, 1)


def test_sizes_are_equal_where_they_are_in_all_classes():
    assert joint([{8: 0, 16: 0, 32: 2}]) == {8: 0, 16: 0, 32: 2}
    assert joint([{8: 0, 16: 0, 32: 0}, {8: 0, 16: 1, 32: 1}]) == {8: 0, 16: 1, 32: 1}
    assert joint([{8: 0, 16: 0, 32: 2}, {8: 0, 16: 1, 32: 1}]) == {8: 0, 16: 1, 32: 2}
