"""Outputs for training, through the engine and `LLM`."""

import dataclasses

import numpy as np
import pytest

from jaxinfer.compilations import count_compilations
from jaxinfer.config import EngineConfig, EngineConfigError, check
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import LOGPROBS_MODES, RequestError, SamplingParams
from tests.engine.test_invariance import bits, prompts_of
from tests.fakes import mixed_params, random_model

SIZES = {"max_num_seqs": 4, "prefill_sizes": (16, 64), "max_model_len": 200}
ON = {"enable_training_outputs": True, "max_logprobs": -1, **SIZES}
ALL = {"logprob_token_ids": [3, 96, 3], "return_entropy": True, "return_sampling_mask": True}
KINDS = {
    "plain": {},
    "multi_step": {"multi_step": 3},
    "ngram": {"speculative": "ngram", "num_speculative_tokens": 4},
    "small_pool": {"num_pages": 9, "page_size": 16, "max_model_len": 128},
}


EACH = [kind if kind in ("plain", "small_pool") else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(random_model(), **ON)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(random_model(), **SIZES)


def asks(**changes) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.9, "top_p": 0.8, "seed": 4, "max_tokens": 12} | ALL | changes))


def entries(arrays) -> list[bytes]:
    """Return the bytes of all arrays."""
    found = [getattr(arrays, field.name) for field in dataclasses.fields(arrays)]
    return [np.asarray(each).tobytes() for one in found for each in (one if isinstance(one, tuple) else (one,))]


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_arrays_agree_with_the_whole_vocabulary(llm, mode):
    arrays = llm.generate([[1, 2, 3]], asks(logprobs=-1, logprobs_mode=mode))[0].outputs[0].arrays
    tokens, whole, (indptr, indices) = arrays.token_ids, arrays.vocabulary, arrays.sampling_mask
    rows = np.arange(len(tokens))
    assert whole.shape == (len(tokens), 97) == (12, 97)
    assert arrays.logprobs.tobytes() == whole[rows, tokens].tobytes()
    assert arrays.token_logprobs.tobytes() == whole[:, ALL["logprob_token_ids"]].tobytes()
    assert (indptr.dtype, indices.dtype, arrays.entropies.dtype) == (np.int32, np.int32, np.float32)
    assert indptr[0] == 0
    assert indptr[-1] == len(indices)
    for row, token in enumerate(tokens):
        kept = indices[indptr[row] : indptr[row + 1]]
        assert token in kept
        assert (np.diff(kept) > 0).all()
        if mode.startswith("processed"):
            assert kept.tolist() == np.flatnonzero(np.isfinite(whole[row])).tolist()
        else:
            assert 1 < len(kept) < 97
        if mode.endswith("logprobs"):
            chances = np.exp(whole[row].astype(np.float64))
            assert chances.sum() == pytest.approx(1, abs=1e-5)
            with np.errstate(invalid="ignore"):
                entropy = -np.nansum(chances * whole[row])
            assert arrays.entropies[row] == pytest.approx(entropy, abs=1e-4)


def test_raw_log_probabilities_are_those_of_a_plain_request(llm):
    first = llm.generate([[1, 2, 3]], asks(logprobs=2))[0].outputs[0]
    names = ("temperature", "top_p", "seed", "max_tokens")
    second = llm.generate([[1, 2, 3]], SamplingParams(**{n: getattr(asks(), n) for n in names}, logprobs=2))[0].outputs[
        0
    ]
    assert first.token_ids == second.token_ids
    assert first.logprobs == second.logprobs
    assert second.arrays.entropies is second.arrays.sampling_mask is second.arrays.vocabulary is None


@pytest.mark.parametrize("kind", EACH)
def test_neighbours_keep_their_bits_and_nothing_compiles(kind):
    plain, llm = (LLM(random_model(), **settings | KINDS[kind]) for settings in (SIZES, ON))
    prompts = prompts_of([1, 9, 17, 30, 5, 40], 97)
    params = [mixed_params(number) for number in range(6)]
    want = [bits(output) for output in plain.generate(prompts, params)]
    alone = entries(llm.generate([[7, 8]], asks())[0].outputs[0].arrays)
    with count_compilations() as seen:
        found = llm.generate([*prompts, [7, 8]], [*params, asks()])
    assert seen.count == 0
    assert [bits(output) for output in found[:-1]] == want
    assert entries(found[-1].outputs[0].arrays) == alone
    llm.engine.check()


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_forced_trace_has_all_arrays_of_its_generation(kind, mode):
    llm = LLM(random_model(), **ON | KINDS[kind])
    free = asks(logprobs=-1, logprobs_mode=mode, max_tokens=20, repetition_penalty=1.2)
    made = llm.generate([[4, 5]], free)[0].outputs[0]
    forced = dataclasses.replace(free, forced_token_ids=made.token_ids)
    again = llm.generate([[4, 5]], forced)[0].outputs[0]
    assert entries(again.arrays) == entries(made.arrays)


def test_a_grammar_is_in_the_mask():
    llm = LLM("demo", max_num_seqs=2, max_model_len=128, enable_training_outputs=True)
    constraint = {"structured_outputs": {"choice": ["yes", "no"]}, "temperature": 1.0, "top_p": 1.0}
    output = llm.generate("Is it?", asks(logprob_token_ids=None, **constraint))[0].outputs[0]
    indptr, indices = output.arrays.sampling_mask
    first = {llm.tokenizer.token_bytes(token) for token in indices[: indptr[1]].tolist()}
    assert 1 < len(first) < 8
    assert all(b"yes".startswith(each) or b"no".startswith(each) for each in first)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"return_entropy": True}, "return_entropy"),
        ({"return_sampling_mask": True, "top_k": 3}, "return_sampling_mask"),
        ({"logprobs": -1}, "logprobs"),
    ],
)
def test_an_engine_without_them_rejects_them(plain, given, field):
    with pytest.raises(RequestError) as caught:
        plain.generate([[1]], SamplingParams(**given))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"logprobs_mode": "processed"}, "logprobs_mode"),
        ({"logprobs_mode": "raw_logits", "prompt_logprobs": 1}, "logprobs_mode"),
        ({"logprob_token_ids": []}, "logprob_token_ids"),
        ({"logprob_token_ids": [1] * 129}, "logprob_token_ids"),
        ({"logprob_token_ids": [97]}, "logprob_token_ids"),
        ({"return_sampling_mask": True, "temperature": 1.0}, "return_sampling_mask"),
        ({"return_entropy": 1}, "return_entropy"),
        ({"logprobs": -2}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_invalid_values_are_rejected(llm, given, field):
    with pytest.raises(RequestError) as caught:
        llm.generate([[1]], SamplingParams(**given))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"max_logprobs": -1}, "max_logprobs"),
        ({"max_logprobs": -2, "enable_training_outputs": True}, "max_logprobs"),
    ],
)
def test_settings_that_exclude_each_other_are_rejected(settings, name):
    with pytest.raises(EngineConfigError) as caught:
        check(EngineConfig(**settings))
    assert str(caught.value).startswith(name)
