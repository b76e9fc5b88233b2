"""Outputs for training of an engine with DP attention, compared with those of one device."""

import numpy as np

from jaxinfer.compilations import count_compilations
from jaxinfer.llm import LLM
from jaxinfer.outputs import TokenArrays
from jaxinfer.sampling_params import SamplingParams
from tests.engine.test_invariance import prompts_of
from tests.parallel.devices.test_tensor import model_of

SETTINGS = {
    "max_num_seqs": 4,
    "max_model_len": 64,
    "page_size": 16,
    "prefill_sizes": (16,),
    "enable_training_outputs": True,
    "max_logprobs": -1,
}
ASKS = {"logprobs": -1, "logprob_token_ids": [3, 5], "return_entropy": True, "return_routed_experts": True}


def params(number: int) -> SamplingParams:
    if number % 3 == 2:
        return SamplingParams(temperature=0.0, max_tokens=7)
    mode = "processed_logprobs" if number % 2 else "raw_logprobs"
    rest = {"prompt_logprobs": 0} if mode == "raw_logprobs" else {"return_sampling_mask": True}
    own = {"logprobs_mode": mode, "top_k": 3, "temperature": 0.01, "seed": number}
    return SamplingParams(max_tokens=6 + number, ignore_eos=True, **ASKS, **own, **rest)


def compared(found: TokenArrays, want: TokenArrays) -> None:
    assert np.array_equal(found.token_ids, want.token_ids)
    for name in ("logprobs", "entropies", "token_logprobs", "vocabulary"):
        np.testing.assert_allclose(getattr(found, name), getattr(want, name), atol=2e-3)
    assert np.array_equal(found.routed_experts, want.routed_experts)
    if want.sampling_mask is not None:
        assert all(map(np.array_equal, found.sampling_mask, want.sampling_mask))


def test_ranks_return_what_one_device_returns():
    model, prompts = model_of("experts"), prompts_of([1, 9, 17, 30, 5, 40, 3], 96)
    asked = [params(number) for number in range(len(prompts))]
    one = LLM(model, **SETTINGS).generate(prompts, asked)
    ranks = LLM(model, **SETTINGS, expert_parallel_size=2, enable_dp_attention=True)
    with count_compilations() as seen:
        found = ranks.generate(prompts, asked)
    assert seen.count == 0
    ranks.engine.check()
    for number, (theirs, ours) in enumerate(zip(one, found, strict=True)):
        want, got = theirs.outputs[0], ours.outputs[0]
        if asked[number].training_output is None:
            assert got.token_ids == want.token_ids
            assert got.arrays.routed_experts is None
            continue
        compared(got.arrays, want.arrays)
        if asked[number].prompt_logprobs is not None and len(prompts[number]) > 1:
            assert np.array_equal(ours.prompt_routed_experts, theirs.prompt_routed_experts)
            assert ours.prompt_routed_experts.shape[0] == len(prompts[number]) - 1
