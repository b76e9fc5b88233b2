"""Tests that `Frontend` and `LLM` give identical text, tokens, logprobs and finish reasons on the demo model."""

import asyncio
import time

import pytest

from jaxinfer.llm import LLM
from jaxinfer.opening import model_folder
from jaxinfer.outputs import CompletionOutput, LogprobsDict, RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.api.requests import Call, Conversation, ModelCard
from jaxinfer.serve.core.async_engine import AsyncEngine
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.text import ChatTemplate, Tokenizer
from jaxinfer.types import PositionLogprobs

PROMPTS = ["Once upon a time", "The naïve 狐 🦊 said: «", "x"]
SAMPLINGS = {
    "greedy": {"temperature": 0.0, "max_tokens": 40, "logprobs": 3, "prompt_logprobs": 2},
    "sampled": {"temperature": 1.3, "seed": 7, "n": 2, "max_tokens": 40, "logprobs": 0},
    "stops": {"temperature": 0.9, "seed": 3, "n": 2, "stop": [" the", "a.", "\n"], "max_tokens": 60, "logprobs": 1},
    "kept": {"temperature": 0.0, "stop": "e", "include_stop_str_in_output": True, "min_tokens": 9, "max_tokens": 60},
    # Far from the training data: bytes that form no characters.
    "wild": {"temperature": 50.0, "seed": 11, "n": 3, "max_tokens": 60, "ignore_eos": True},
    "until the end": {"temperature": 0.0},
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    settings = {"max_num_seqs": 4, "max_model_len": 128, "page_size": 16, "prefill_sizes": (16,)}
    return LLM("demo", "float32", show_progress=False, **settings)


def front(llm: LLM, backend: AsyncEngine) -> Frontend:
    assert llm.tokenizer is not None
    folder = model_folder("demo")
    card = ModelCard(
        name="demo",
        architecture="Llama",
        dtype="float32",
        max_model_len=128,
        vocab_size=llm.model.config.vocab_size,
        eos_token_ids=llm.tokenizer.eos_ids,
        defaults={},
        engine={},
        created=1,
    )
    return Frontend(backend, card, Tokenizer.load(folder), ChatTemplate.load(folder))


def candidates(frontend: Frontend, position: PositionLogprobs | None) -> LogprobsDict | None:
    if position is None:
        return None
    found = (*position.top, position.chosen)
    return {c.token_id: (c.logprob, c.rank, frontend.token_text(c.token_id)) for c in found}


async def through(frontend: Frontend, call: Call) -> RequestOutput:
    """Return the deltas of a call, assembled as `LLM` reports them."""
    async with await frontend.generate(call) as generation:
        outputs = [CompletionOutput(index) for index in range(generation.n)]
        whole = RequestOutput("", None, list(generation.prompt_token_ids), outputs, generation.seed)
        async for delta in generation:
            output = outputs[delta.index]
            output.text += delta.text
            output.token_ids += delta.token_ids
            if delta.logprobs:
                output.logprobs = [*(output.logprobs or []), *(candidates(frontend, p) for p in delta.logprobs)]
            if delta.prompt_logprobs is not None:
                whole.prompt_logprobs = [candidates(frontend, p) for p in delta.prompt_logprobs]
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
            time.sleep(0.002 * (delta.index == 0))  # a slow reader, so that deltas are merged
    assert generation.usage.completion == sum(len(output.token_ids) for output in outputs)
    return whole


def assert_same(got: RequestOutput, want: RequestOutput) -> None:
    assert got.prompt_token_ids == want.prompt_token_ids
    assert got.prompt_logprobs == want.prompt_logprobs
    for mine, theirs in zip(got.outputs, want.outputs, strict=True):
        theirs.cumulative_logprob = None
        assert mine == theirs


def test_everything_is_what_llm_gives(llm):
    calls, wanted = [], []
    for sampling in SAMPLINGS.values():
        params = SamplingParams(**{"max_tokens": None, **sampling})
        wanted += llm.generate(PROMPTS, params)
        calls += [Call(prompt, sampling) for prompt in PROMPTS]
    messages = [{"role": "user", "content": "Tell me of the naïve 狐."}]
    wanted += llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=30))
    calls.append(Call(Conversation(messages), {"temperature": 0.0, "max_tokens": 30}))

    async def run() -> list[RequestOutput]:
        async with AsyncEngine(llm.engine) as backend:
            frontend = front(llm, backend)
            got = await asyncio.gather(*(through(frontend, call) for call in calls))
            await frontend.aclose()
            return got

    reasons = set()
    for mine, theirs in zip(asyncio.run(run()), wanted, strict=True):
        assert_same(mine, theirs)
        reasons |= {type(output.stop_reason) for output in theirs.outputs}
    assert str in reasons


def test_scores_are_llms_prompt_logprobs(llm):
    context, continuations = "Once upon a time", [" there was a girl", " the", ".", " 狐"]

    async def run() -> list[list[tuple[int, float, int]]]:
        async with AsyncEngine(llm.engine) as backend:
            frontend = front(llm, backend)
            scored = await frontend.score(context, continuations)
            await frontend.aclose()
            return [[tuple(position.chosen) for position in each.tokens] for each in scored]

    assert llm.tokenizer is not None
    head = llm.tokenizer.encode(context)
    for got, continuation in zip(asyncio.run(run()), continuations, strict=True):
        ids = llm.tokenizer.encode(continuation, add_special_tokens=False)
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        told = llm.generate([[*head, *ids]], params)[0].prompt_logprobs
        assert told is not None
        want = [(token, *position[token][:2]) for token, position in zip(ids, told[len(head) :], strict=True)]
        assert got == want
