"""Pages of generated tokens are reused like prompt pages if the startup probe finds decode and prefill rows identical.

Attention blocks of one size, and matmuls whose bits do not depend on the row count, ensure it on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams
from pallas_kernels.paged_attention import xla
from tests.engine.test_invariance import bits, prompts_of
from tests.fakes import mixed_params, random_model

VOCAB = 97
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_model_len": 160,
    "page_size": 16,
    "prefill_sizes": (16,),
    "num_pages": 24,
    "swap_space_gib": 0,
}


@pytest.fixture(
    scope="module",
    params=[{}, {"speculative": "ngram", "speculative_adaptive": False}],
    ids=["alone", "with drafts"],
)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(xla, "decode_block", lambda _: xla.PREFILL_BLOCK)
        made = LLM(random_model(), **SETTINGS, **request.param)
        assert made.engine.calibration.decode_agrees
        yield made


def test_a_follow_up_turn_finds_what_was_generated_and_has_the_same_bits(llm):
    (prompt,) = prompts_of([20], VOCAB)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=80, logprobs=3)
    llm.engine.reset_prefix_cache()
    said = llm.generate([prompt], params)[0].outputs[0].token_ids
    turn, before = [*prompt, *said, 1, 2, 3], llm.engine.stats().prefix_hits
    warm = bits(llm.generate([turn], params)[0])
    assert llm.engine.stats().prefix_hits - before == (20 + 80 - 1) // 16 * 16
    llm.engine.reset_prefix_cache()
    assert bits(llm.generate([turn], params)[0]) == warm


def test_who_gave_way_computes_what_it_said_in_chunks_and_goes_on_with_the_same_bits(llm):
    prompts = prompts_of([20, 33, 5, 16, 40, 9], VOCAB, seed=1)
    each = [mixed_params(number % 4, seed=number, max_tokens=100, logprobs=2) for number in range(len(prompts))]
    alone = []
    for prompt, params in zip(prompts, each, strict=True):
        llm.engine.reset_prefix_cache()
        alone += llm.generate([prompt], params)
    llm.engine.reset_prefix_cache()
    before = llm.engine.stats()
    together = llm.generate(prompts, each)
    stats = llm.engine.stats()
    assert stats.preemptions["recompute"] > before.preemptions["recompute"]
    assert stats.replayed_tokens == stats.replay_mismatches == 0
    assert [bits(output) for output in together] == [bits(output) for output in alone]
