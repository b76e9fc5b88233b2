"""Tests of ``POST /v1/messages`` with the official client: unary, streamed, token counts and errors."""

import asyncio
import pathlib
from typing import Any

import anthropic
import httpx
import pytest

from jaxinfer.serve.api.auth import key_entry, new_key
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.http.anthropic.errors import ROUTES
from jaxinfer.serve.http.app import SCOPES
from tests.parsers.corpus import CASES
from tests.parsers.corpus import TOOLS as CORPUS_TOOLS
from tests.serve.fake_engine import Mischief
from tests.serve.http.scripted import speaking
from tests.serve.http.support import BOUND, Running, events, post, run, serving
from tests.serve.http.test_messages import CALL, THOUGHT
from tests.serve.http.test_messages import TOOLS as CHAT_TOOLS

FUNCTION = CHAT_TOOLS[0]["function"]
TOOLS: list[Any] = [{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}]
MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather?"}]
ASKED: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 500}
PLAIN: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Grüße"}], "max_tokens": 40}
SEEDED: dict[str, Any] = {**PLAIN, "extra_body": {"seed": 5}}
FAMILIES = {str(each.parsers.tool_calls): each for each in sorted(CASES, key=lambda case: len(case.text))}
TEXTS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}


def client_of(running: Running, **settings: Any) -> anthropic.AsyncAnthropic:
    given = {"api_key": "none", "max_retries": 0, "timeout": BOUND, **settings}
    return anthropic.AsyncAnthropic(base_url=running.url, **given)


async def streamed(running: Running, **body: Any) -> list[Any]:
    async with running.http() as client:
        answer = await client.post("/v1/messages", json={**body, "stream": True})
        assert answer.status_code == 200, answer.text
        names = [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")]
        found: list[Any] = events(answer.text)
        assert names == [each["type"] for each in found]
        return found


def check_events(found: list[Any]) -> dict[str, Any]:
    """Check the official event order, block by block; return the assembled message, with inputs as text."""
    types = [each["type"] for each in found]
    assert types[:2] == ["message_start", "ping"]
    assert types[-2:] == ["message_delta", "message_stop"]
    message = found[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    blocks: list[Any] = []
    for each in found[2:-2]:
        if each["type"] == "content_block_start":
            blocks.append({**each["content_block"], "said": "", "open": True})
        assert each["index"] == len(blocks) - 1
        assert blocks[-1]["open"]
        if each["type"] == "content_block_delta":
            name = TEXTS[blocks[-1]["type"]]
            kind = "input_json_delta" if name == "partial_json" else f"{name}_delta"
            assert each["delta"]["type"] == kind
            blocks[-1]["said"] += each["delta"][name]
        blocks[-1]["open"] = each["type"] != "content_block_stop"
    assert not any(block["open"] for block in blocks)
    return {**message, **found[-2]["delta"], "usage": found[-2]["usage"], "content": blocks}


def object_of(arguments: Any) -> Any:
    return arguments if isinstance(arguments, dict) else {"INVALID_JSON": arguments}


def test_a_message_is_the_chats_answer() -> None:
    async def test() -> None:
        async with serving() as running, client_of(running) as client, running.openai() as other:
            message = await client.messages.create(**SEEDED)
            asked: Any = {"model": "fake", "messages": PLAIN["messages"], "seed": 5, "max_tokens": 40}
            chat = await other.chat.completions.create(**asked)
            (block,) = message.content
            assert block.type == "text"
            assert block.text == chat.choices[0].message.content
            assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
            assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
            assert (message.usage.input_tokens, message.usage.output_tokens) == (chat.usage.prompt_tokens, 40)
            assert message.id.startswith("msg_")

    run(test)


def test_thoughts_texts_and_calls_are_blocks() -> None:
    async def test() -> None:
        answer = f"{THOUGHT}Let me see.\n{CALL}\n{CALL}"
        async with speaking(answer) as running, client_of(running) as client:
            message = await client.messages.create(**ASKED)
            assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
            thinking, text, call, _ = message.content
            assert thinking.type == "thinking"
            assert (thinking.thinking, thinking.signature) == ("I need the weather.", "")
            assert text.type == "text"
            assert text.text == "Let me see.\n"
            assert call.type == "tool_use"
            assert (call.name, call.input) == ("weather", {"city": "Zürich 🦊"})
            assert message.stop_reason == "tool_use"
            assert message.usage.output_tokens_details is not None
            assert message.usage.output_tokens_details.thinking_tokens == len(thinking.thinking)
            async with client.messages.stream(**ASKED) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_message()
            assert {"thinking", "text", "input_json", "message_stop"} <= set(kinds)
            for one, other in zip(message.content, final.content, strict=True):
                assert {**one.model_dump(), "id": ""}.items() <= {**other.model_dump(), "id": ""}.items()
            assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", message.usage.output_tokens)

    run(test)


@pytest.mark.parametrize("case", FAMILIES.values(), ids=FAMILIES)
def test_every_familys_answer_streams_as_it_is(case: Any) -> None:
    async def test() -> None:
        tools = [{"name": each["function"]["name"], "input_schema": {"type": "object"}} for each in CORPUS_TOOLS]
        for tool, each in zip(tools, CORPUS_TOOLS, strict=True):
            tool["input_schema"] = each["function"].get("parameters", {"type": "object"})
        asked = {"messages": MESSAGES, "tools": tools, "max_tokens": 900}
        async with speaking(case.text, parsers=case.parsers, template="{{ messages }}{{ tools }}") as running:
            async with running.http() as client:
                whole = (await client.post("/v1/messages", json=asked)).json()
            found = check_events(await streamed(running, **asked))
            assert [each["type"] for each in found["content"]] == [each["type"] for each in whole["content"]]
            for one, other in zip(found["content"], whole["content"], strict=True):
                said = other.get("text", other.get("thinking"))
                assert said is None or one["said"] == said
            assert found["stop_reason"] == whole["stop_reason"]
            if not case.prompt:  # else the prompt opens the thought, which this template does not do
                calls = [(each["name"], each["input"]) for each in whole["content"] if each["type"] == "tool_use"]
                assert calls == [(name, object_of(said)) for name, said in case.calls]

    run(test)


def test_why_a_message_ended() -> None:
    async def test() -> None:
        async with serving(engine={"max_model_len": 64}) as running, client_of(running) as client:
            for changes, reason, stop in (
                ({"max_tokens": 10}, "max_tokens", None),
                ({"max_tokens": 1000}, "model_context_window_exceeded", None),
                ({"max_tokens": 1000, "stop_sequences": ["dogs", "o"]}, "stop_sequence", "o"),
            ):
                message = await client.messages.create(**{**SEEDED, **changes})
                assert (message.stop_reason, message.stop_sequence) == (reason, stop)
                async with client.messages.stream(**{**SEEDED, **changes}) as stream:
                    final = await stream.get_final_message()
                assert (final.stop_reason, final.stop_sequence) == (reason, stop)
        async with serving(Mischief(eos_after=4)) as running, client_of(running) as client:
            assert (await client.messages.create(**SEEDED)).stop_reason == "end_turn"

    run(test)


def test_arguments_that_are_no_object_come_as_they_are() -> None:
    async def test() -> None:
        async with speaking(f"{THOUGHT}{CALL}") as running, client_of(running) as client:
            message = await client.messages.create(**{**ASKED, "max_tokens": 80})
            call = message.content[-1]
            assert call.type == "tool_use"
            (said,) = call.input.values()
            assert list(call.input) == ["INVALID_JSON"]
            assert '{"city": "Zürich 🦊"}'.startswith(str(said))
            assert message.stop_reason == "max_tokens"

    run(test)


def test_a_thought_may_be_left_out() -> None:
    async def test() -> None:
        async with speaking(f"{THOUGHT}Yes.") as running, client_of(running) as client:
            thinking: Any = {"type": "adaptive", "display": "omitted"}
            message = await client.messages.create(**ASKED, thinking=thinking)
            assert [block.type for block in message.content] == ["text"]
            assert message.usage.output_tokens_details is not None
            assert message.usage.output_tokens_details.thinking_tokens > 0

    run(test)


def test_thinking_reaches_the_template() -> None:
    async def test() -> None:
        async with speaking("Yes.") as running, client_of(running) as client:
            counts = []
            for kind in ("enabled", "disabled"):
                thinking: Any = {"type": kind, **({"budget_tokens": 1024} if kind == "enabled" else {})}
                counted = await client.messages.count_tokens(model="fake", messages=MESSAGES, thinking=thinking)
                message = await client.messages.create(model="fake", messages=MESSAGES, max_tokens=9, thinking=thinking)
                assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted.input_tokens
                counts.append(counted.input_tokens)
            assert counts[1] - counts[0] == 2  # <think></think>, one token each

    run(test)


def test_one_call_where_one_is_asked_for_and_none_where_none_is() -> None:
    async def test() -> None:
        async with speaking(CALL + CALL) as running, client_of(running) as client:
            message = await client.messages.create(
                **ASKED, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
            )
            assert [block.type for block in message.content] == ["tool_use"]
            message = await client.messages.create(**ASKED, tool_choice={"type": "none"})
            assert [block.type for block in message.content] == ["text"]

    run(test)


def test_a_prompt_that_was_cached_is_counted_apart() -> None:
    async def test() -> None:
        async with serving() as running, client_of(running) as client:
            asked: Any = {"model": "fake", "messages": [{"role": "user", "content": "x" * 90}], "max_tokens": 1}
            for cached in (0, 96):
                counted = await client.messages.count_tokens(model="fake", messages=asked["messages"])
                async with client.messages.stream(**asked) as stream:
                    first = await anext(aiter(stream))
                    final = await stream.get_final_message()
                assert first.type == "message_start"
                for usage in (first.message.usage, final.usage):
                    assert (usage.cache_read_input_tokens, usage.input_tokens) == (
                        cached,
                        counted.input_tokens - cached,
                    )

    run(test)


# ---- errors


@pytest.mark.parametrize(
    ("changes", "error", "kind", "said"),
    [
        ({"extra_body": {"temperature": -1.0}}, anthropic.BadRequestError, "invalid_request_error", "temperature=-1.0"),
        ({"model": "claude"}, anthropic.NotFoundError, "not_found_error", "'claude' is not served here"),
        ({"extra_body": {"colour": "red"}}, anthropic.BadRequestError, "invalid_request_error", "colour is not"),
        ({"extra_body": {"x": ["y" * 99] * 60000}}, anthropic.RequestTooLargeError, "request_too_large", "larger than"),
    ],
)
def test_errors_by_their_classes(changes: Any, error: Any, kind: str, said: str) -> None:
    async def test() -> None:
        limits = ServeLimits(message_bytes=1 << 20)
        async with serving(limits=limits) as running, client_of(running) as client:
            for stream in (False, True):
                with pytest.raises(error, match=said) as refused:
                    await client.messages.create(**{**PLAIN, **changes}, stream=stream)
                assert refused.value.body["error"]["type"] == kind
                assert refused.value.body["request_id"] == refused.value.request_id

    run(test)


def test_counting_refuses_what_a_message_would() -> None:
    async def test() -> None:
        async with serving() as running, client_of(running) as client:
            with pytest.raises(anthropic.NotFoundError, match="'claude' is not served here"):
                await client.messages.count_tokens(model="claude", messages=MESSAGES)
            with pytest.raises(anthropic.BadRequestError, match="tools: the model's chat template has no place"):
                await client.messages.count_tokens(model="fake", messages=MESSAGES, tools=TOOLS)
            with pytest.raises(anthropic.BadRequestError, match="max_tokens is not a field"):
                await client.messages.count_tokens(model="fake", messages=MESSAGES, extra_body={"max_tokens": 3})

    run(test)


def test_a_fault_within_a_stream_is_an_error_event() -> None:
    async def test() -> None:
        async with serving(Mischief(fault_at=6, seconds=0.002)) as running, client_of(running) as client:
            with pytest.raises(anthropic.APIStatusError, match="does not run") as failed:
                async for _ in await client.messages.create(**SEEDED, stream=True):
                    pass
            assert failed.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
            with pytest.raises(anthropic.APIStatusError) as refused:
                await client.messages.create(**SEEDED)
            assert refused.value.status_code == 503
            assert refused.value.response.headers["retry-after"]

    run(test)


def test_routes_and_methods_that_are_not_served() -> None:
    async def test() -> None:
        async with serving() as running, running.http() as client:
            answer = await client.get("/v1/messages")
            assert (answer.status_code, answer.json()["error"]["type"]) == (405, "invalid_request_error")
            assert set(SCOPES) >= ROUTES

    run(test)


def test_a_key_is_also_taken_from_its_header(tmp_path: pathlib.Path) -> None:
    key, path = new_key(), tmp_path / "keys.yaml"
    path.write_text(key_entry(key, "alice", ["infer"]))

    async def test() -> None:
        async with serving(keys=path) as running:
            async with client_of(running, api_key=key) as client:
                assert (await client.messages.create(**PLAIN)).type == "message"
            async with client_of(running, api_key=None, auth_token=key) as client:
                assert (await client.messages.create(**PLAIN)).type == "message"
            async with client_of(running, api_key="wrong") as client:
                with pytest.raises(anthropic.AuthenticationError) as refused:
                    await client.messages.create(**PLAIN)
                assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
            for headers, status in (
                ([("x-api-key", key)], 200),
                ([("x-api-key", key), ("authorization", f"Bearer {key}")], 200),
                ([("x-api-key", key), ("x-api-key", key)], 200),
                ([("x-api-key", key), ("authorization", "Bearer wrong")], 401),
                ([("x-api-key", key), ("authorization", "Basic abc")], 401),
                ([("x-api-key", "wrong"), ("authorization", f"Bearer {key}")], 401),
                ([("x-api-key", key), ("x-api-key", "wrong")], 401),
                ([("x-api-key", "")], 401),
            ):
                async with running.http() as plain:
                    assert (await plain.get("/v1/models", headers=headers)).status_code == status, headers

    run(test)


def test_a_key_that_is_taken_away_ends_a_stream_with_an_error(tmp_path: pathlib.Path) -> None:
    key, path = new_key(), tmp_path / "keys.yaml"
    path.write_text(key_entry(key, "alice", ["infer"]))

    async def test() -> None:
        async with serving(Mischief(seconds=0.01), keys=path) as running:
            async with running.http(headers={"x-api-key": key}) as client:
                body = {**PLAIN, "max_tokens": 1000, "stream": True}
                async with client.stream("POST", "/v1/messages", json=body) as answer:
                    lines = answer.aiter_lines()
                    await anext(lines)
                    path.write_text("[]")
                    running.door.authoriser.look()
                    rest = [line async for line in lines]
            assert "event: error" in rest
            (told,) = events("\n".join(rest[rest.index("event: error") :]))
            assert told["error"]["type"] == "authentication_error"  # type: ignore[index]
            assert told["type"] == "error"  # type: ignore[index]

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_pages(stream: bool) -> None:
    async def test() -> None:
        async with serving(Mischief(seconds=0.01)) as running:
            _, writer = await running.connect()
            sent = httpx.Request("POST", "http://x", json={**PLAIN, "max_tokens": 1000, "stream": stream}).content
            writer.write(post("/v1/messages", sent))
            while (await running.frontend.stats()).running == 0:
                await asyncio.sleep(0.005)
            writer.close()
            await running.quiet()

    run(test)
