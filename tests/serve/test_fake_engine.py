"""Tests of the fake engine: its output follows its rule."""

import asyncio

import pytest

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.core.async_engine import AsyncEngine
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import FinishReason, Request
from tests.serve import fake_engine as fake


def make_request(name: str, prompt, **params) -> Request:
    return Request(name, tuple(prompt), SamplingParams(**{"max_tokens": 50, **params}), frozenset({fake.EOS}))


async def read(stream) -> dict[int, list]:
    got: dict[int, list] = {}
    async for delta in stream:
        got.setdefault(delta.index, []).append(delta)
    return got


def tokens(deltas) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("settings", [{}, {"multi_step": 4}, {"async_scheduling": False}, {"max_num_seqs": 2}])
def test_outputs_follow_the_rule(settings):
    async def main():
        prompts = [range(3, 3 + length) for length in (1, 5, 40, 300)]
        requests = [make_request(f"r{i}", p, n=3, logprobs=2, seed=i) for i, p in enumerate(prompts)]
        async with AsyncEngine(fake.FakeEngine(**settings)) as served:
            streams = [await served.submit(request) for request in requests]
            for seed, (stream, prompt) in enumerate(zip(streams, prompts, strict=True)):
                for index, deltas in (await read(stream)).items():
                    want = fake.expected_tokens(prompt, seed, index, 50)
                    assert tokens(deltas) == want
                    assert [p for d in deltas for p in d.logprobs] == [
                        fake.expected_logprobs(t, len(prompt) + i, 2) for i, t in enumerate(want)
                    ]
            stats = await served.stats()
            assert (stats.running, stats.kv.held) == (0, 0)

    asyncio.run(main())


def test_prompt_logprobs_and_eos():
    async def main():
        prompt = list(range(3, 203))
        async with AsyncEngine(fake.FakeEngine(fake.Mischief(eos_after=4))) as served:
            request = make_request("a", prompt, prompt_logprobs=1, seed=0)
            (deltas,) = (await read(await served.submit(request))).values()
        assert deltas[0].prompt_logprobs == [None] + [fake.expected_logprobs(prompt[i], i, 1) for i in range(1, 200)]
        assert tokens(deltas) == [*fake.expected_tokens(prompt, 0, 0, 4), fake.EOS]
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, fake.EOS)

    asyncio.run(main())


def test_an_unset_seed_is_drawn():
    async def main():
        async with AsyncEngine(fake.FakeEngine()) as served:
            streams = [await served.submit(make_request(name, [5])) for name in "ab"]
            seeds = [stream.request.params.seed for stream in streams]
            assert len(set(seeds)) == 2
            for stream, seed in zip(streams, seeds, strict=True):
                (deltas,) = (await read(stream)).values()
                assert tokens(deltas) == fake.expected_tokens([5], seed, 0, 50)

    asyncio.run(main())


def test_the_tokenizer_is_of_bytes_and_its_folder_says_the_same(tmp_path):
    text = "naïve 狐\n"
    folder = fake.write_fake_folder(tmp_path / "fake")
    for tokenizer in (fake.fake_tokenizer(), Tokenizer.load(folder)):
        ids = tokenizer.encode(text)
        assert ids == [fake.FIRST_BYTE + byte for byte in text.encode()]
        assert tokenizer.decode(ids) == text
        assert (tokenizer.eos_ids, tokenizer.vocab_size) == ((fake.EOS,), fake.VOCAB)
    messages = [{"role": "user", "content": "Hi"}]
    for template in (fake.fake_template(), ChatTemplate.load(folder)):
        assert template is not None
        assert template.render(messages, add_generation_prompt=True) == "[user] Hi\n[a] "
