"""Forced tokens: an output is a given trace, with the bits that a generation of the same tokens returns."""

import numpy as np
import pytest

from jaxinfer.compilations import count_compilations
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import ContextLengthError, RequestError, SamplingParams
from tests.engine.test_invariance import prompts_of
from tests.fakes import mixed_params, random_model

SETTINGS = {
    "plain": {},
    "no_async": {"async_scheduling": False},
    "multi_step": {"multi_step": 4},
    "small_pool": {"num_pages": 9, "page_size": 16, "max_model_len": 128},
    "ngram": {"speculative": "ngram", "num_speculative_tokens": 4},
    "grammar": {"speculative": "grammar"},
}


def make(name: str, **settings) -> LLM:
    given = {"max_num_seqs": 4, "prefill_sizes": (16, 64), "max_model_len": 200} | SETTINGS[name] | settings
    return LLM(random_model(), **given)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make("plain")


def generated(llm: LLM, count: int = 12):
    """Generate with mixed parameters; return prompts, completions and their log probabilities, one for each sample."""
    prompts = prompts_of([1 + 7 * number for number in range(count)], 97)
    params = [mixed_params(number, logprobs=0) for number in range(count)]
    params[0] = SamplingParams(temperature=0.0, max_tokens=20, logprobs=0)
    params[1] = SamplingParams(temperature=1.0, top_p=0.9, seed=3, n=3, max_tokens=15, logprobs=2)
    outputs = llm.generate(prompts, params)
    samples = [(prompt, each) for prompt, whole in zip(prompts, outputs, strict=True) for each in whole.outputs]
    samples = [(prompt, each) for prompt, each in samples if each.token_ids]
    return (
        [prompt for prompt, _ in samples],
        [each.token_ids for _, each in samples],
        [each.arrays.logprobs for _, each in samples],
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_logprobs_have_the_bits_of_the_generation(name):
    llm = make(name)
    prompts, completions, want = generated(llm)
    before = sum(llm.engine.stats().preemptions.values())
    with count_compilations() as seen:
        found = llm.logprobs(prompts, completions)
    assert seen.count == 0
    assert [each.dtype for each in found] == [np.float32] * len(found)
    assert [each.tobytes() for each in found] == [each.tobytes() for each in want]
    assert len(set(np.concatenate(found).tolist())) > 30
    stats = llm.engine.stats()
    assert (sum(stats.preemptions.values()) > before) == (name == "small_pool")
    assert stats.replay_mismatches == 0
    llm.engine.check()


def test_any_trace_is_forced_and_scored(llm):
    prompt, trace = [3, 1, 4], [96, 0, 31, 32, 63, 64, 5, 5, 5]
    params = [SamplingParams(temperature=t, seed=1, logprobs=3, forced_token_ids=trace, max_tokens=2) for t in (0, 0.7)]
    greedy, sampled = (whole.outputs[0] for whole in llm.generate([prompt] * 2, params))
    assert greedy.token_ids == sampled.token_ids == trace
    assert greedy.finish_reason == "length"
    assert greedy.logprobs == sampled.logprobs
    (score,) = llm.score(prompt, [trace])
    assert greedy.arrays.logprobs == pytest.approx([c[t].logprob for c, t in zip(score.logprobs, trace, strict=True)])


@pytest.mark.parametrize(
    "given",
    [
        {"allowed_token_ids": [7]},
        {"logit_bias": {5: -100.0}},
        {"repetition_penalty": 1.9, "presence_penalty": 2.0},
        {"top_k": 1, "temperature": 1.0},
    ],
)
def test_other_parameters_do_not_change_a_trace(llm, given):
    trace = [5, 9, 5, 9]
    plain = SamplingParams(logprobs=0, forced_token_ids=trace)
    other = SamplingParams(logprobs=0, forced_token_ids=trace, **given)
    first, second = (whole.outputs[0] for whole in llm.generate([[1, 2]] * 2, [plain, other]))
    assert first.token_ids == second.token_ids == trace
    assert first.logprobs == second.logprobs


def test_a_stop_token_ends_a_trace_at_its_end_only(llm):
    params = SamplingParams(forced_token_ids=[7, 8, 7], stop_token_ids=[7])
    output = llm.generate([[1]], params)[0].outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([7, 8, 7], "stop", 7)


def test_with_drafts_a_trace_takes_few_steps():
    llm = make("ngram", max_num_seqs=1)
    trace = np.random.default_rng(2).integers(0, 97, 40).tolist()
    steps = llm.engine.stats().steps
    llm.generate([[1, 2, 3]], SamplingParams(forced_token_ids=trace))
    assert llm.engine.stats().steps - steps < 30


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"forced_token_ids": []}, "forced_token_ids"),
        ({"n": 2}, "n"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"stop": "a"}, "stop"),
        ({"thinking_token_budget": 3}, "thinking_token_budget"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"speculation": {"acceptance": "typical"}}, "speculation"),
    ],
)
def test_conflicts_are_rejected(given, field):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**({"forced_token_ids": [1, 2]} | given))
    assert caught.value.field == field


@pytest.mark.parametrize(("trace", "error"), [([97], RequestError), ([1] * 198, ContextLengthError)])
def test_traces_that_do_not_fit_are_rejected(llm, trace, error):
    with pytest.raises(error) as caught:
        llm.generate([[1, 2, 3]], SamplingParams(forced_token_ids=trace))
    assert caught.value.field == "forced_token_ids"
    assert llm.generate([[1, 2, 3]], SamplingParams(forced_token_ids=[1] * 197))[0].outputs[0].token_ids == [1] * 197


def test_an_engine_without_masks_rejects_traces():
    llm = make("plain", structured_output_helpers=0)
    with pytest.raises(RequestError) as caught:
        llm.logprobs([[1]], [[2]])
    assert caught.value.field == "forced_token_ids"


def test_completions_are_text_too_and_one_for_each_prompt():
    llm = LLM("demo", max_num_seqs=4, max_model_len=256)
    text = " a time"
    (found,) = llm.logprobs("Once upon", text)
    (same,) = llm.logprobs("Once upon", [np.array(llm.tokenizer.encode(text, add_special_tokens=False))])
    assert found.tobytes() == same.tobytes()
    for completions in (["a", "b"], []):
        with pytest.raises(RequestError) as caught:
            llm.logprobs(["Once upon"], completions)
        assert caught.value.field == "completions"


def test_arrays_equal_the_dictionaries_which_are_made_when_read(llm):
    params = [SamplingParams(max_tokens=9, seed=1, logprobs=number) for number in (None, 0, 3)]
    none, *outputs = (whole.outputs[0] for whole in llm.generate([[5, 6]] * 3, params))
    assert none.arrays.logprobs is None
    assert none.arrays.token_ids.tolist() == none.token_ids
    for output in outputs:
        assert output.logprobs._made == []
        arrays = output.arrays
        assert (arrays.token_ids.dtype, arrays.logprobs.dtype) == (np.int32, np.float32)
        assert arrays.token_ids.tolist() == output.token_ids
        assert output.logprobs._made == []
        want = [position[token].logprob for token, position in zip(output.token_ids, output.logprobs, strict=True)]
        assert arrays.logprobs.tolist() == want
