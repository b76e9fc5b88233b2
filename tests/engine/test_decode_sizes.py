"""Decode programs of several sizes: a step takes the smallest that holds its slots; results stay bitwise identical."""

import collections
import contextlib
import dataclasses

import numpy as np
import pytest

from jaxinfer.compilations import count_compilations
from jaxinfer.config import EngineConfig, EngineConfigError, resolve
from jaxinfer.config.defaults import of_platform
from jaxinfer.engine.execution.commands import DecodeBatch, with_rows
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams
from tests.engine.test_identity import make_requests, run
from tests.engine.test_invariance import bits
from tests.fakes import random_model

SETTINGS = {"max_num_seqs": 16, "max_model_len": 160, "page_size": 16, "prefill_sizes": (16, 64), "num_pages": 200}
# XLA:CPU gives float32 rows the same bits in products of 8 and of 16 rows: the startup probe shows it.
SIZES = {"decode_sizes": (8,)}
MODES = {
    "plain": {},
    "several steps": {"multi_step": 3},
    "drafts": {"speculative": "ngram", "num_speculative_tokens": 3},
    "token trees": {"speculative": "suffix", "num_speculative_tokens": 2, "speculative_tree": 2},
}


@contextlib.contextmanager
def counted(llm):
    """Count the calls of decode programs by their rows."""
    (part,), calls = llm.engine._executor.runtimes, collections.Counter()
    before = part.run

    def counting(programs):
        def of(rows, program):
            return lambda *operands: calls.update([rows]) or program(*operands)

        return {rows: of(rows, program) for rows, program in programs.items()}

    part.run = dataclasses.replace(before, decode=counting(before.decode), decode_many=counting(before.decode_many))
    yield calls
    part.run = before


@pytest.mark.parametrize("mode", MODES)
def test_a_request_has_the_same_bits_whatever_the_rows_of_its_steps(mode):
    """Results are identical alone in the small program, batched in the large one, and with the large one only."""
    model, requests = random_model(), make_requests(20, 97)
    llm, one = LLM(model, **SETTINGS, **SIZES, **MODES[mode]), LLM(model, **SETTINGS, **MODES[mode])
    assert llm.engine.calibration.decode_sizes == [8, 16]
    assert one.engine.calibration.decode_sizes == [16]
    expected = run(one, requests)
    with counted(llm) as calls, count_compilations() as compilations:
        together = run(llm, requests)
        assert calls[16]
        calls.clear()
        for request, want in zip(requests, expected, strict=True):
            llm.engine.reset_prefix_cache()
            assert run(llm, [request]) == [want]
        assert calls[8]
        assert set(calls) == {8} or mode in ("drafts", "token trees")  # three samples with drafts need more rows
    assert together == expected
    assert compilations.count == 0


def test_a_request_moves_between_programs_while_others_come_and_go():
    """All programs keep the sampler's state (penalties count tokens) in the same slots."""
    llm = LLM(random_model(), **SETTINGS, **SIZES)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=40, repetition_penalty=1.3, logprobs=2)
    alone = bits(llm.generate([[5, 6, 7]], params)[0])
    short = [SamplingParams(temperature=1.0, seed=at, max_tokens=2 + at % 9) for at in range(30)]
    with counted(llm) as calls:
        outputs = llm.generate([[5, 6, 7], *([at, at + 1] for at in range(30))], [params, *short])
    assert bits(outputs[0]) == alone
    assert calls[8] > 5
    assert calls[16] > 5


def test_relaxed_engines_use_every_size():
    llm = LLM(random_model("bfloat16"), **SETTINGS, decode_sizes=(1, 2, 4), exactness="relaxed")
    assert llm.engine.calibration.decode_sizes == [1, 2, 4, 16]
    with counted(llm) as calls:
        llm.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=5))
    assert set(calls) == {2}


@pytest.mark.parametrize("memory", [0, 16 << 30, 141 << 30])
def test_a_gpu_has_programs_for_few_rows(memory):
    defaults = of_platform("gpu", memory)
    cache = random_model().cache_spec

    def sizes(**settings):
        engine = resolve(EngineConfig(**settings), cache, max_position=256, itemsize=2, defaults=defaults)
        assert engine.decode_sizes[-1] == engine.rows // engine.microbatches
        return engine.decode_sizes

    assert sizes() == tuple(size for size in (2, 8, 16, 32, 64, 128, 256) if size <= defaults.max_num_seqs)
    assert sizes(max_num_seqs=48) == (2, 8, 16, 32, 48)
    assert sizes(max_num_seqs=1) == (2,)
    assert sizes(max_num_seqs=48, pipeline_parallel_size=2) == (2, 8, 16, 24)
    assert sizes(max_num_seqs=48, decode_sizes=(1, 4, 100)) == (4, 48)


@pytest.mark.parametrize("wrong", [(4, 2), (2, 2), (0, 4), (-1,)])
def test_sizes_that_are_none_are_rejected(wrong):
    with pytest.raises(EngineConfigError, match="decode_sizes"):
        resolve(EngineConfig(decode_sizes=wrong), random_model().cache_spec, max_position=256, itemsize=4)


def test_a_batch_is_filled_up_and_cut():
    def batch(rows, value):
        return DecodeBatch(*(np.full(rows, value),) * 3, np.full((1, rows, 2), value), np.full(rows, value))

    wider = with_rows(batch(2, 7), like=batch(4, -1))
    assert wider.positions.tolist() == wider.owners.tolist() == [7, 7, -1, -1]
    assert wider.tables.tolist() == [[[7, 7], [7, 7], [-1, -1], [-1, -1]]]
    assert wider.branches is None
    assert with_rows(wider, like=batch(3, 0)).tokens.tolist() == [7, 7, -1]
