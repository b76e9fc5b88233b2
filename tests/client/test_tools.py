"""Tests of an agent loop with tool calls in the clients, and of the conversion of its messages."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from google.protobuf import json_format

from jaxinfer import client as c
from jaxinfer.client.requests import generate_request
from jaxinfer.v1 import inference_pb2 as pb
from tests.serve.grpc.speaking import Speaking, speaking
from tests.serve.http.test_messages import CALL, MESSAGES, THOUGHT, TOOLS

ARGUMENTS = {"city": "Zürich 🦊"}
SAID = f"{THOUGHT}Let me see.{CALL}{CALL}"


def whole(client: c.Client, messages: list[Any]) -> c.Completion:
    return client.generate(messages=messages, tools=TOOLS, parse=True)


def streamed(client: c.Client, messages: list[Any]) -> c.Completion:
    """Return the completion; check that the deltas add up to it."""
    with client.stream(messages=messages, tools=TOOLS, parse=True) as stream:
        deltas = list(stream)
        found = stream.completion()
    assert "".join(delta.text for delta in deltas) == found.text
    assert "".join(delta.reasoning for delta in deltas) == found.reasoning
    news = [call for delta in deltas for call in delta.tool_calls]
    assert [call.id for call in news if call.id is not None] == [call.id for call in found.tool_calls]
    for index, call in enumerate(found.tool_calls):
        assert "".join(new.arguments for new in news if new.index == index) == call.arguments
    return found


def agent(server: Speaking, ask: Any) -> tuple[str, list[Any], list[Any]]:
    """Send requests until the model calls no tool; return its text, its calls, and all messages."""
    messages, seen = list(MESSAGES), list[Any]()
    with server.client() as client:
        while True:
            completion = ask(client, messages)
            messages.append(completion.message)
            if completion.finish_reason != "tool_calls":
                return completion.text, seen, messages
            for call in completion.tool_calls:
                seen.append((call.name, json.loads(call.arguments)))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})


@pytest.mark.parametrize("ask", [whole, streamed])
def test_an_agent_calls_tools_and_gets_their_answers(ask: Any) -> None:
    async def story() -> None:
        async with speaking(SAID, "It is sunny.") as server:
            text, seen, messages = await asyncio.to_thread(agent, server, ask)
            assert (text, seen) == ("It is sunny.", [("weather", ARGUMENTS)] * 2)
            async with server.aio() as client:
                prompt = await client.detokenize(await client.tokenize(messages=messages))
            assert "[assistant]<think>I need the weather.</think>Let me see.<tool_call>{" in prompt
            assert prompt.count('"arguments": {"city": "Zürich 🦊"}') == 2
            assert prompt.count("[tool]sunny") == 2

    asyncio.run(asyncio.wait_for(story(), 60))


def test_the_asynchronous_client_and_batches() -> None:
    async def story() -> None:
        async with speaking(SAID, SAID, SAID) as server, server.aio() as client:
            answer = await client.generate(messages=MESSAGES, tools=TOOLS, parse=True)
            async with client.stream(messages=MESSAGES, tools=TOOLS, parse=True) as stream:
                again = await stream.completion()
            items = client.generate_batch([MESSAGES], tools=TOOLS, parse=True)
            for found in (answer, again, *[item.result() async for item in items]):
                message = {"role": "assistant", "content": "Let me see.", "reasoning": "I need the weather."}
                assert found.message == {**message, "tool_calls": found.tool_calls}
                calls = [(call.name, json.loads(call.arguments)) for call in found.tool_calls]
                assert calls == [("weather", ARGUMENTS)] * 2
                assert all(isinstance(call, c.ToolCall) and call.id for call in found.tool_calls)

    asyncio.run(asyncio.wait_for(story(), 60))


def test_unless_it_is_asked_for_nothing_is_read() -> None:
    async def story() -> None:
        async with speaking(CALL) as server, server.aio() as client:
            found = await client.generate(messages=MESSAGES, tools=TOOLS)
            assert (found.text, found.tool_calls, found.finish_reason) == (CALL, [], "stop")
            assert found.message == {"role": "assistant", "content": CALL}
            with pytest.raises(c.InvalidRequest, match="='required' needs parse=true") as refused:
                await client.generate(messages=MESSAGES, tools=TOOLS, tool_choice="required")
            assert refused.value.field == "chat.tool_choice"

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_message_that_only_calls_has_no_content() -> None:
    output = c.Output(text="", tool_calls=[c.ToolCall("a", "f", "{}")])
    assert output.message == {"role": "assistant", "content": None, "tool_calls": [c.ToolCall("a", "f", "{}")]}


def sent(message: dict[str, Any]) -> dict[str, Any]:
    request = generate_request(None, None, [message], {})
    (found,) = request.chat.messages
    return json_format.MessageToDict(found, preserving_proto_field_name=True)


def test_messages_are_sent_typed_where_they_have_a_type() -> None:
    function = {"name": "f", "arguments": "{}"}
    call = {"id": "a", "type": "function", "function": function}
    typed = {"role": "assistant", "tool_calls": [{"id": "a", "name": "f", "arguments": "{}"}]}
    assert sent({"role": "assistant", "tool_calls": [call]}) == typed
    assert sent({"role": "assistant", "tool_calls": [c.ToolCall("a", "f", "{}")]}) == typed
    tool = {"role": "tool", "content": "x", "tool_call_id": "a"}
    assert sent(tool) == tool
    assert sent({"role": "assistant", "reasoning": "Hm."}) == {"role": "assistant", "reasoning": "Hm."}
    for other in (
        [{**call, "function": {"name": "f", "arguments": {"a": 1}}}],
        [call, {**call, "index": 0}],
        [{"id": "a", "function": function}],
        [],
        None,
    ):
        fields = json.loads(json.dumps({"tool_calls": other}), parse_int=float)
        assert sent({"role": "assistant", "tool_calls": other}) == {"role": "assistant", "fields": fields}
    with pytest.raises(ValueError, match=r"tool_calls=.* cannot be sent"):
        sent({"role": "assistant", "tool_calls": [c.ToolCall(1, "f")]})  # type: ignore[arg-type]


def test_choices_of_tools() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named, named]}}
    for choice, message in (
        ("auto", pb.ToolChoice(mode=pb.TOOL_MODE_AUTO)),
        ("none", pb.ToolChoice(mode=pb.TOOL_MODE_NONE)),
        ("required", pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)),
        (named, pb.ToolChoice(function="f")),
        (allowed, pb.ToolChoice(allowed=pb.AllowedTools(mode=pb.TOOL_MODE_AUTO, functions=["f", "f"]))),
    ):
        chat = generate_request(None, None, MESSAGES, {"tool_choice": choice}).chat
        assert chat.tool_choice == message
    for wrong in (
        "any",
        1,
        {},
        {"type": "function"},
        {**named, "more": 1},
        {"type": "function", "function": {"name": 1}},
        {"type": "allowed_tools", "allowed_tools": {"mode": [], "tools": [named]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": {"type": "function"}}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named, "f"]}},
    ):
        with pytest.raises(ValueError, match=r"tool_choice=.* must be 'auto', 'none', 'required', or an object"):
            generate_request(None, None, MESSAGES, {"tool_choice": wrong})


def test_options_of_the_answer_are_a_generations_alone() -> None:
    options = {"parse": True, "parallel_tool_calls": False, "include_reasoning": False, "reasoning_effort": "none"}
    chat = generate_request(None, None, MESSAGES, options).chat
    assert {field.name: value for field, value in chat.ListFields() if field.name != "messages"} == options
    with pytest.raises(TypeError, match="parse goes with messages only"):
        generate_request("a", None, None, {"parse": True})
