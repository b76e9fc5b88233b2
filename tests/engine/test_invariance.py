"""Batch invariance: a request gives the same bits whatever else is in the batch."""

import numpy as np
import pytest

from jaxinfer.llm import LLM
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import SamplingParams
from tests.fakes import medium_model, mixed_params, random_model


def bits(output: RequestOutput) -> list:
    """Return all user-visible outputs, with exact logprobs."""
    return [
        (sample.token_ids, sample.logprobs, sample.cumulative_logprob, sample.finish_reason)
        for sample in output.outputs
    ] + [output.prompt_logprobs]


def prompts_of(lengths: list[int], vocab: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


def check_every_slot(llm: LLM, rows: int, lengths: list[int]) -> None:
    """Compare one prompt alone with the same prompt at each index of a full batch of prompts of other lengths."""
    vocab = llm.model.config.vocab_size
    probe = prompts_of([70], vocab, seed=1)[0]
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=6, logprobs=5)
    alone = bits(llm.generate([probe], params)[0])
    others = prompts_of(lengths, vocab)
    for place in range(rows):
        batch = [others[(place + i) % len(others)] for i in range(rows)]
        batch[place] = probe
        together = llm.generate(batch, [params if i == place else mixed_params(i) for i in range(rows)])
        assert bits(together[place]) == alone, f"at place {place}"


HALF = [pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("bfloat16", "float16")]


@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_demo_model_at_every_slot(dtype):
    llm = LLM("demo", dtype, max_num_seqs=4, max_model_len=256, prefill_sizes=(16, 64))
    check_every_slot(llm, 4, [1, 5, 100, 64, 65, 17])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_wide_model_in_a_batch_of_64(dtype):
    """At these shapes the bits of XLA's matmuls do depend on the row count."""
    llm = LLM(medium_model(dtype), max_num_seqs=64, max_model_len=128, prefill_sizes=(16, 64))
    probes = prompts_of([1, 9, 40, 90], 2048, seed=2)
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=4)
    alone = [bits(llm.generate([probe], params)[0]) for probe in probes]
    # An idle engine gives prompt i slot i: four rotations move the probes through all 64 slots.
    for turn in range(len(probes)):
        order = [(place + turn) % len(probes) for place in range(64)]
        together = llm.generate([probes[i] for i in order], params)
        assert [bits(output) for output in together] == [alone[i] for i in order], f"rotation {turn}"
    rng = np.random.default_rng(3)
    for turn in range(2):
        batch = prompts_of(rng.integers(1, 100, 64).tolist(), 2048, seed=10 + turn)
        places = rng.permutation(64)[: len(probes)]
        each = [mixed_params(i, max_tokens=4) for i in range(64)]
        for place, probe in zip(places, probes, strict=True):
            batch[place], each[place] = probe, params
        together = llm.generate(batch, each)
        assert [bits(together[place]) for place in places] == alone


@pytest.mark.slow
def test_the_wide_model_can_fail():
    """A decode program of another row count gives other bits, so the test above would detect a dependence on it."""
    model = medium_model("float32")
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=4)
    probe = prompts_of([40], 2048, seed=2)
    few, many = (
        bits(LLM(model, max_num_seqs=n, max_model_len=128, prefill_sizes=(16, 64)).generate(probe, params)[0])
        for n in (1, 64)
    )
    assert few != many


@pytest.fixture(scope="module")
def small() -> LLM:
    return LLM(random_model(), max_num_seqs=4, max_model_len=64, page_size=16, prefill_sizes=(16,))


def test_same_seed_twice_and_samples_differ(small):
    params = SamplingParams(temperature=1.0, seed=11, n=3, max_tokens=20)
    first, second = (small.generate([[1, 2, 3]], params)[0] for _ in range(2))
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    assert len({tuple(o.token_ids) for o in first.outputs}) == 3


def test_an_unset_seed_is_returned_and_repeats_the_result(small):
    first = small.generate([[1, 2, 3]], SamplingParams(max_tokens=20))[0]
    again = small.generate([[1, 2, 3]], SamplingParams(max_tokens=20, seed=first.seed))[0]
    other = small.generate([[1, 2, 3]], SamplingParams(max_tokens=20))[0]
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    assert first.outputs[0].token_ids != other.outputs[0].token_ids
