"""Draft models are sharded as their target model, and their pages as the target's pages."""

import pytest

from jaxinfer.compilations import count_compilations
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams
from tests.parallel.devices.test_tensor import SETTINGS, TIGHT, model_of

DRAFTS = {"speculative_adaptive": False, "num_speculative_tokens": 3}
PLACES = {
    "copies of heads": ("few KV heads", {"tensor_parallel_size": 4}),
    "replicas": ("groups", {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    "stages": ("groups", {"pipeline_parallel_size": 2}),
    "stages of heads": ("groups", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
}


def drafting(model, draft, axes, method):
    """Return statistics of an engine that drafts, after checking that its outputs equal those without drafts."""
    settings = {**SETTINGS, "num_pages": TIGHT, "max_num_seqs": 8, **axes}
    prompts = [[(7 * number + place * place) % 90 for place in range(3 + 9 * number)] for number in range(6)]
    params = [
        SamplingParams(temperature=number % 2, seed=number, max_tokens=20, logprobs=2, ignore_eos=True)
        for number in range(len(prompts))
    ]
    want = LLM(model, **settings).generate(prompts, params)
    llm = LLM(model.replace(draft=draft), **settings, **DRAFTS, speculative=method)
    with count_compilations() as compilations:
        got = llm.generate(prompts, params)
    llm.engine.check()
    assert [each.outputs for each in got] == [each.outputs for each in want]
    assert compilations.count == 0
    return llm.engine.stats()


@pytest.mark.parametrize("name", ["copies of heads", "stages of heads"])
def test_a_draft_model_says_what_the_model_says(name):
    kind, axes = PLACES[name]
    model = model_of(kind)
    stats = drafting(model, model, axes, "draft_model")
    assert stats.draft_tokens > 20
    assert stats.draft_accepted > 0.98 * stats.draft_tokens
