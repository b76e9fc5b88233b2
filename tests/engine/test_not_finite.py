"""Non-finite logits: the request ends with an error; all other requests are unaffected."""

import math
from array import array

import jax.numpy as jnp
import pytest

from jaxinfer.compilations import count_compilations
from jaxinfer.engine.scheduling.sequence import Sequence
from jaxinfer.kv.cache_key import cache_identity
from jaxinfer.kv.radix import PageKeys
from jaxinfer.llm import LLM
from jaxinfer.models.model import Model
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.text.output import NOT_FINITE
from jaxinfer.types import FinishReason, PositionLogprobs, Request, TokenLogprob
from tests.fakes import mixed_params, random_model

POISON = 7  # token whose embedding is NaN, and so its keys and values
LOUD = 8  # token in no prompt, whose logit overflows
SETTINGS = {"max_num_seqs": 4, "prefill_sizes": (16, 64), "page_size": 16, "max_model_len": 128, "num_pages": 24}


def poisoned() -> Model:
    model = random_model()
    table = model.params["embed"]["table"].at[POISON].set(jnp.nan)
    return model.replace(params={**model.params, "embed": {"table": table}})


def overflowing() -> Model:
    model = random_model()
    table = model.params["head"]["table"].at[LOUD].set(3e38)
    return model.replace(params={**model.params, "head": {"table": table}})


def prompts() -> list[list[int]]:
    """Return prompts of which every other one contains POISON: at its beginning, in its middle or at its end."""
    clean = [[10 + (3 * number + place) % 60 for place in range(5 + 9 * number)] for number in range(6)]
    mixed = []
    for number, prompt in enumerate(clean):
        bad = list(prompt)
        bad[(0, len(prompt) // 2, -1)[number % 3]] = POISON
        mixed += [prompt, bad]
    return mixed


def params(number: int) -> SamplingParams:
    return mixed_params(number, max_tokens=12, logprobs=2, logit_bias={POISON: -100.0}, stop_token_ids=[1])


def is_failed(output: RequestOutput) -> bool:
    return [(each.token_ids, each.finish_reason, each.stop_reason) for each in output.outputs] == [
        ([], "error", NOT_FINITE)
    ] * len(output.outputs)


@pytest.mark.parametrize(
    "more", [{}, {"multi_step": 4}, {"speculative": "ngram", "num_speculative_tokens": 3}], ids=str
)
def test_who_overflows_fails_and_nobody_else_notices(more: dict):
    """Clean requests match their runs alone, batched with failing ones and on pages that held NaN."""
    llm = LLM(poisoned(), **SETTINGS, **more)
    alone = [llm.generate([prompt], params(number))[0] for number, prompt in enumerate(prompts()[::2])]
    with count_compilations() as compiled:
        for _ in range(2):
            outputs = llm.generate(prompts(), [params(number // 2) for number in range(12)])
            assert [is_failed(output) for output in outputs] == [
                POISON in output.prompt_token_ids for output in outputs
            ]
            for output, want in zip(outputs[::2], alone, strict=True):
                assert output.outputs == want.outputs
    assert compiled.count == 0
    stats = llm.engine.stats()
    assert stats.finished[FinishReason.NOT_FINITE] == 12
    assert stats.kv.held == 0
    llm.engine.check()


def test_every_sample_of_a_request_fails():
    llm = LLM(poisoned(), **SETTINGS)
    bad, good = llm.generate(
        [[5, POISON], [5, 6]], SamplingParams(n=3, max_tokens=4, ignore_eos=True, logit_bias={POISON: -100.0})
    )
    assert is_failed(bad)
    assert [len(each.token_ids) for each in good.outputs] == [4] * 3


def test_one_infinite_logit_is_enough():
    """The request fails even if greedy or restricted sampling would ignore the infinite logit, or select it."""
    llm = LLM(overflowing(), **SETTINGS)
    for asked in ({"temperature": 0.0}, {"allowed_token_ids": [3]}, {"logit_bias": {LOUD: -100.0}}, {"top_k": 2}):
        [output] = llm.generate([[5, 6, 9]], SamplingParams(max_tokens=4, **asked))
        assert is_failed(output)


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_a_prompt_without_numbers_fails_where_its_logprobs_are_asked_for(logprob: float):
    """The request fails even if the logits after the prompt are finite."""
    request = Request("r", (5, 6), SamplingParams(max_tokens=4, prompt_logprobs=0), frozenset())
    sequence = Sequence(request, 0, 0, array("i", (5, 6)), PageKeys(cache_identity(request), 16), 1, 5)
    sequence.prompt_logprobs.append(PositionLogprobs(TokenLogprob(6, logprob, 1), ()))
    assert (sequence.take([9]), sequence.finish_reason) == (0, FinishReason.NOT_FINITE)
