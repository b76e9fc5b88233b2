"""Mixed programs: a prompt chunk and decode rows in one pass over the weights; results stay bitwise identical."""

import contextlib
import dataclasses

import numpy as np
import pytest

from jaxinfer.compilations import count_compilations
from jaxinfer.config import EngineConfig, EngineConfigError, resolve
from jaxinfer.config.defaults import CPU
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams
from pallas_kernels import few_rows
from tests.engine.execution.test_probe import nudged, probe_with
from tests.engine.test_identity import make_requests, run
from tests.engine.test_invariance import bits
from tests.fakes import random_model

SETTINGS = {"max_num_seqs": 8, "max_model_len": 160, "page_size": 16, "prefill_sizes": (8, 16, 64), "num_pages": 200}
MIXED = {"decode_sizes": (2,), "mixed_prefill_sizes": (8, 16)}

needs_kernel = pytest.mark.skipif(few_rows.unavailable() is not None, reason=str(few_rows.unavailable()))


@contextlib.contextmanager
def counted(llm):
    """Count the calls of mixed programs by chunk size."""
    (part,), calls = llm.engine._executor.runtimes, []
    before = part.run

    def counting(size, program):
        return lambda *operands: calls.append(size) or program(*operands)

    part.run = dataclasses.replace(before, mixed={size: counting(size, each) for size, each in before.mixed.items()})
    yield calls
    part.run = before


@pytest.fixture(scope="module")
def mixed():
    return LLM(random_model(), **SETTINGS, **MIXED)


@needs_kernel
def test_a_request_has_the_same_bits_whether_its_chunk_is_mixed(mixed):
    """Alone, where tails of prompts run with the row of the last token, in a batch, and without mixed programs."""
    requests, plain = make_requests(20, 97), LLM(random_model(), **SETTINGS, decode_sizes=(2,))
    assert mixed.engine.calibration.mixed_sizes == [8, 16]
    assert plain.engine.calibration.mixed_sizes == []
    expected = run(plain, requests)
    with counted(mixed) as calls, count_compilations() as compilations:
        together = run(mixed, requests)
        for request, want in zip(requests, expected, strict=True):
            mixed.engine.reset_prefix_cache()
            assert run(mixed, [request]) == [want]
    assert set(calls) == {8, 16}
    assert together == expected
    assert compilations.count == 0


@needs_kernel
def test_a_chunk_runs_with_the_rows_of_another_sequence(mixed):
    """A prompt arrives while another sequence decodes: both have the bits of each alone."""
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=12, repetition_penalty=1.3, logprobs=2)
    prompts = [[5, 6, 7], list(range(1, 12))]
    alone = [bits(mixed.generate([prompt], params)[0]) for prompt in prompts]
    mixed.engine.reset_prefix_cache()
    seen = []
    running = mixed.engine._runner._executor.run

    def watched(command):
        if getattr(command, "chunk", None) is not None:
            seen.append(int((command.batch.positions >= 0).sum()))
        return running(command)

    mixed.engine._runner._executor.run = watched
    try:
        outputs = mixed.generate(prompts, params)
    finally:
        del mixed.engine._runner._executor.run
    assert [bits(output) for output in outputs] == alone
    assert 2 in seen  # both rows: of the prompt's last token, and of the other sequence


@needs_kernel
def test_a_program_that_differs_is_not_used(mixed):
    """By the last bit of a key of the chunk or of a row, by a token, or because the chunk is not computed."""
    engine, page = mixed.engine, mixed.engine.config.page_size
    program = engine._executor.runtimes[-1].run.mixed[8]

    def other_keys(at, slot):
        def changed(*operands):
            state, sampled = program(*operands)
            return state._replace(pools=nudged(state.pools, at, slot)), sampled

        return changed

    def other_tokens(*operands):
        state, sampled = program(*operands)
        return state, sampled._replace(tokens=sampled.tokens ^ 1)

    def without_chunk(params, slots, state, packed, *rest):
        packed = np.array(packed)
        packed[9] = 0  # after 8 tokens and the start
        return program(params, slots, state, packed, *rest)

    with probe_with(engine) as probe:
        assert probe.mixed_sizes(engine.limits) == [8, 16]
    row = other_keys(engine.config.table_width, page - 1)
    for spoiled in (other_keys(0, 2), row, other_tokens, without_chunk):
        with probe_with(engine, mixed={**engine._executor.runtimes[-1].run.mixed, 8: spoiled}) as probe:
            assert probe.mixed_sizes(engine.limits) == [16]


def resolved(**settings):
    model = random_model()
    changes = settings.pop("cache", {})
    cache = dataclasses.replace(model.cache_spec, **changes)
    defaults = CPU._replace(alike_rows=64)
    return resolve(EngineConfig(**settings), cache, max_position=512, itemsize=4, defaults=defaults)


def test_which_sizes_are_mixed_by_default():
    assert resolved().mixed_prefill_sizes == (8,)
    assert resolved(prefill_sizes=(16, 64)).mixed_prefill_sizes == ()
    assert resolved(speculative="ngram").mixed_prefill_sizes == ()
    assert resolved(enable_lora=True).mixed_prefill_sizes == ()
    assert resolved(mixed_prefill_sizes=()).mixed_prefill_sizes == ()
    assert resolved(mixed_prefill_sizes=(32,)).mixed_prefill_sizes == (32,)


@pytest.mark.parametrize(
    "settings",
    [
        {"mixed_prefill_sizes": (12,)},
        {"mixed_prefill_sizes": (16, 8)},
        {"mixed_prefill_sizes": (8,), "speculative": "ngram"},
        {"mixed_prefill_sizes": (8,), "enable_lora": True},
        {"mixed_prefill_sizes": (8,), "tensor_parallel_size": 2},
    ],
)
def test_sizes_that_cannot_be_mixed_are_rejected(settings):
    with pytest.raises(EngineConfigError) as caught:
        resolved(**settings)
    assert "mixed_prefill_sizes" in str(caught.value)
