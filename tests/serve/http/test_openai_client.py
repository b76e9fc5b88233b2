"""Tests with the official OpenAI client on a real server."""

import asyncio
import threading

import openai
import pytest

from jaxinfer.serve.api.requests import Call, Conversation
from tests.serve.fake_engine import EOS, FIRST_BYTE, Mischief, expected_text, expected_tokens
from tests.serve.http.support import run, serving

MESSAGES = [{"role": "user", "content": "Grüße"}]
RENDERED = "[user] Grüße\n[a] "


def ids(text):
    return [FIRST_BYTE + byte for byte in text.encode()]


def clean(text):
    """Return the text without a truncated character at the end."""
    return text.rstrip("�")


def test_completions():
    async def test():
        async with serving() as running, running.openai() as client:
            answer = await client.completions.create(model="fake", prompt="Hi", max_tokens=40, seed=3, n=2)
            assert [choice.text for choice in answer.choices] == [expected_text(ids("Hi"), 3, k, 40) for k in (0, 1)]
            assert [choice.index for choice in answer.choices] == [0, 1]
            assert {choice.finish_reason for choice in answer.choices} == {"length"}
            assert answer.id.startswith("cmpl-")
            assert (answer.object, answer.model) == ("text_completion", "fake")
            assert answer.system_fingerprint.startswith("fp_")
            usage = answer.usage
            assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 80, 82)
            assert usage.prompt_tokens_details.cached_tokens == 0

    run(test)


SPECULATIVE = {"speculative": "ngram"}


@pytest.mark.parametrize("asked", [None, {}, {"max_tokens": 1}, {"enabled": False}, {"acceptance": "typical"}])
def test_a_choice_says_where_drafts_were_not_kept_exactly(asked):
    body = {"speculation": asked}
    told = {"acceptance": "typical"} if asked and "acceptance" in asked else None

    async def test():
        async with serving(engine=SPECULATIVE) as running, running.openai() as client:
            terms = {"model": "fake", "max_tokens": 40, "seed": 3, "n": 2, "extra_body": body}
            answer = await client.completions.create(prompt="Hi", **terms)
            talk = await client.chat.completions.create(messages=MESSAGES, **terms)
            assert [choice.text for choice in answer.choices] == [expected_text(ids("Hi"), 3, k, 40) for k in (0, 1)]
            for choice in (*answer.choices, *talk.choices):
                assert (choice.model_extra or {}).get("speculation") == told
            streams = (
                await client.completions.create(prompt="Hi", stream=True, **terms),
                await client.chat.completions.create(messages=MESSAGES, stream=True, **terms),
            )
            for stream in streams:
                choices = [choice async for chunk in stream for choice in chunk.choices]
                ends = [choice for choice in choices if choice.finish_reason is not None]
                assert len(ends) == 2
                for choice in choices:
                    marked = (choice.model_extra or {}).get("speculation")
                    assert marked == (told if choice in ends else None)

    run(test)


def test_typical_acceptance_is_refused_where_nothing_is_drafted():
    async def test():
        async with serving() as running, running.openai() as client:
            with pytest.raises(openai.BadRequestError) as refusal:
                await client.completions.create(
                    model="fake", prompt="Hi", extra_body={"speculation": {"acceptance": "typical"}}
                )
            assert refusal.value.param == "speculation"
            assert "speculation.acceptance='typical' needs drafts, and there are none" in refusal.value.message

    run(test)


def test_max_tokens_is_16_as_in_openais_api_and_null_is_all_that_is_left():
    async def test():
        async with serving(engine={"max_model_len": 64}) as running, running.openai() as client:
            answer = await client.completions.create(model="fake", prompt="Hi", seed=1)
            assert answer.usage.completion_tokens == 16
            answer = await client.completions.create(model="fake", prompt="Hi", seed=1, max_tokens=None)
            assert answer.usage.completion_tokens == 62
            answer = await client.chat.completions.create(model="fake", messages=MESSAGES)
            assert answer.usage.total_tokens == 64

    run(test)


@pytest.mark.parametrize("prompt", ["Hi", ids("Hi"), ["Hi", "Ho", "é"], [ids("Hi"), ids("Ho")]])
def test_streamed_text_is_the_unary_one_and_the_front_ends(prompt):
    async def test():
        async with serving() as running, running.openai() as client:
            asked = {"model": "fake", "prompt": prompt, "max_tokens": 150, "seed": 7, "n": 2, "stop": ["dogs. 🦊"]}
            answer = await client.completions.create(**asked)
            texts = [""] * len(answer.choices)
            reasons = [None] * len(texts)
            async for chunk in await client.completions.create(**asked, stream=True):
                assert chunk.object == "text_completion"
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                    reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            assert texts == [choice.text for choice in answer.choices]
            assert reasons == [choice.finish_reason for choice in answer.choices]
            assert "stop" in reasons
            prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
            for place, each in enumerate(prompts):
                call = Call(each, {name: asked[name] for name in ("max_tokens", "seed", "n", "stop")})
                async with await running.frontend.generate(call) as generation:
                    own = [""] * 2
                    async for delta in generation:
                        own[delta.index] += delta.text
                assert own == texts[2 * place : 2 * place + 2]

    run(test)


def test_chat_streamed_and_not():
    async def test():
        async with serving() as running, running.openai() as client:
            asked = {"model": "fake", "messages": MESSAGES, "max_completion_tokens": 61, "seed": 5, "n": 3}
            answer = await client.chat.completions.create(**asked)
            assert answer.id.startswith("chatcmpl-")
            assert answer.object == "chat.completion"
            expected = [expected_text(ids(RENDERED), 5, k, 61) for k in range(3)]
            assert [choice.message.content for choice in answer.choices] == expected
            assert {choice.message.role for choice in answer.choices} == {"assistant"}
            texts, roles, reasons = [""] * 3, [], []
            stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            usage = None
            async for chunk in stream:
                assert chunk.object == "chat.completion.chunk"
                assert usage is None
                usage = chunk.usage
                assert bool(chunk.choices) == (usage is None)
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                    roles += [choice.delta.role] if choice.delta.role else []
                    if choice.finish_reason:
                        reasons.append(choice.finish_reason)
                        assert not choice.delta.content
            assert texts == expected
            assert (roles, reasons) == (["assistant"] * 3, ["length"] * 3)
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids(RENDERED)), 183)
            async with await running.frontend.generate(Call(Conversation(MESSAGES), {"seed": 5})) as generation:
                assert list(generation.prompt_token_ids) == ids(RENDERED)

    run(test)


def test_eos_ends_with_stop():
    async def test():
        async with serving(Mischief(eos_after=4)) as running, running.openai() as client:
            answer = await client.completions.create(model="fake", prompt="Hi", max_tokens=40, seed=3, logprobs=0)
            choice = answer.choices[0]
            assert choice.finish_reason == "stop"
            assert choice.text == expected_text(ids("Hi"), 3, 0, 4)
            assert len(choice.logprobs.tokens) == 5

    run(test)


def test_logprobs_of_completions():
    async def test():
        async with serving() as running, running.openai() as client:
            asked = {"model": "fake", "prompt": "Hi", "max_tokens": 30, "seed": 8, "logprobs": 2}
            choice = (await client.completions.create(**asked)).choices[0]
            logprobs, tokens = choice.logprobs, expected_tokens(ids("Hi"), 8, 0, 30)
            assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 30
            assert logprobs.token_logprobs[:3] == [-(1 + p % 8) / 4 for p in (2, 3, 4)]
            for token, text, offset in zip(tokens, logprobs.tokens, logprobs.text_offset, strict=True):
                if text != "�" and token != EOS:
                    assert choice.text[offset] == text
            assert all(len(best) == (1 if "�" in best else 2) for best in logprobs.top_logprobs)
            streamed = []
            async for chunk in await client.completions.create(**asked, stream=True):
                streamed += chunk.choices[0].logprobs.text_offset
            assert streamed == logprobs.text_offset

    run(test)


def test_logprobs_of_chat():
    async def test():
        async with serving() as running, running.openai() as client:
            asked = {"model": "fake", "messages": MESSAGES, "max_tokens": 25, "seed": 2}
            asked |= {"logprobs": True, "top_logprobs": 3}
            content = (await client.chat.completions.create(**asked)).choices[0].logprobs.content
            tokens = expected_tokens(ids(RENDERED), 2, 0, 25)
            assert [position.bytes for position in content] == [[token - FIRST_BYTE] for token in tokens]
            assert all(len(position.top_logprobs) == 3 for position in content)
            assert content[0].top_logprobs[0].logprob == content[0].logprob
            streamed = []
            async for chunk in await client.chat.completions.create(**asked, stream=True):
                if (logprobs := chunk.choices[0].logprobs) is not None:
                    streamed += logprobs.content
            assert streamed == content
            plain = await client.chat.completions.create(**{**asked, "logprobs": False, "top_logprobs": None})
            assert plain.choices[0].logprobs is None

    run(test)


def test_echo():
    async def test():
        async with serving() as running, running.openai() as client:
            asked = {"model": "fake", "prompt": "né", "max_tokens": 6, "seed": 1, "echo": True, "logprobs": 1, "n": 2}
            answer = await client.completions.create(**asked)
            for k, choice in enumerate(answer.choices):
                assert choice.text == "né" + expected_text(ids("né"), 1, k, 6)
                assert choice.logprobs.token_logprobs[0] is None
                assert choice.logprobs.top_logprobs[0] is None
                assert choice.logprobs.text_offset[:4] == [0, 1, 1, 2]
                assert len(choice.logprobs.tokens) == 9
            offsets, texts = [[], []], ["", ""]
            async for chunk in await client.completions.create(**asked, stream=True):
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                    offsets[choice.index] += choice.logprobs.text_offset
            assert texts == [choice.text for choice in answer.choices]
            assert offsets == [choice.logprobs.text_offset for choice in answer.choices]
            by_ids = await client.completions.create(model="fake", prompt=ids("né"), max_tokens=6, seed=1, echo=True)
            assert by_ids.choices[0].text == answer.choices[0].text
            nothing = await client.completions.create(**{**asked, "max_tokens": 0, "n": 1})
            assert nothing.choices[0].text == "né"
            assert nothing.choices[0].logprobs.token_logprobs == [None, -0.5, -0.75]
            assert nothing.usage.completion_tokens == 0

    run(test)


def test_vllms_extras():
    async def test():
        async with serving() as running, running.openai() as client:
            extras = {"return_token_ids": True, "prompt_logprobs": 1, "stop_token_ids": [FIRST_BYTE + ord(".")]}
            asked = {"model": "fake", "prompt": "Hi", "max_tokens": 90, "seed": 0, "extra_body": extras}
            choice = (await client.completions.create(**asked)).choices[0]
            assert (choice.finish_reason, choice.stop_reason) == ("stop", FIRST_BYTE + ord("."))
            assert choice.prompt_token_ids == ids("Hi")
            assert choice.token_ids == expected_tokens(ids("Hi"), 0, 0, len(choice.token_ids))
            assert choice.prompt_logprobs[0] is None
            assert choice.prompt_logprobs[1][str(ids("i")[0])]["rank"] == 1
            chunks = [chunk async for chunk in await client.completions.create(**asked, stream=True)]
            assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == choice.token_ids
            assert [hasattr(chunk.choices[0], "prompt_token_ids") for chunk in chunks] == [True] + [False] * (
                len(chunks) - 1
            )

    run(test)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature=-1"),
        ({"model": "gpt-4"}, openai.NotFoundError, "gpt-4"),
        ({"prompt": []}, openai.BadRequestError, "prompt"),
        ({"prompt": "x" * 5000}, openai.BadRequestError, "prompt"),
        ({"logit_bias": {"70000": 1}}, openai.BadRequestError, "70000"),
        ({"extra_body": {"colour": "red"}}, openai.BadRequestError, "colour"),
    ],
)
def test_errors_by_their_classes(changes, error, said):
    async def test():
        async with serving() as running, running.openai() as client:
            with pytest.raises(error, match=said) as refused:
                await client.completions.create(**{"model": "fake", "prompt": "Hi", **changes})
            assert refused.value.body["message"]
            stream = {"model": "fake", "prompt": "Hi", **changes, "stream": True}
            with pytest.raises(error, match=said):  # before the stream begins
                await client.completions.create(**stream)

    run(test)


def test_a_fault_within_a_stream_is_an_error_and_no_end():
    async def test():
        async with serving(Mischief(fault_at=6, seconds=0.002)) as running, running.openai() as client:
            stream = await client.completions.create(model="fake", prompt="Hi", max_tokens=100, stream=True)
            with pytest.raises(openai.APIError, match="does not run"):
                async for _ in stream:
                    pass
            with pytest.raises(openai.InternalServerError) as refused:
                await client.completions.create(model="fake", prompt="Hi")
            assert refused.value.status_code == 503
            assert refused.value.response.headers["retry-after"]

    run(test)


def test_a_client_that_times_out_frees_its_pages():
    async def test():
        async with serving(Mischief(seconds=0.02)) as running, running.openai() as client:
            with pytest.raises(openai.APITimeoutError):
                await client.with_options(timeout=0.2).completions.create(model="fake", prompt="Hi", max_tokens=1000)
            await running.quiet()

    run(test)


def test_models():
    async def test():
        async with serving() as running, running.openai() as client:
            assert [model.id async for model in await client.models.list()] == ["fake"]
            assert (await client.models.retrieve("fake")).owned_by == "jaxinfer"
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("a/b")

    run(test)


def test_the_synchronous_client():
    async def test():
        async with serving() as running:
            found = []

            def use():
                client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
                asked = {"model": "fake", "prompt": "Hi", "max_tokens": 50, "seed": 4}
                whole = client.completions.create(**asked).choices[0].text
                found.append(
                    (whole, "".join(c.choices[0].text for c in client.completions.create(**asked, stream=True)))
                )

            thread = threading.Thread(target=use)
            thread.start()
            await asyncio.to_thread(thread.join)
            text = expected_text(ids("Hi"), 4, 0, 50)
            assert found == [(text, text)]

    run(test)
