"""Tests of tool calls and reasoning over gRPC (unary, streamed, batches), and of the conversion of chat messages."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.parsers.registry import Parsers
from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import Conversation
from jaxinfer.serve.frontend.chat.messages import arguments_of
from jaxinfer.serve.frontend.chat.terms import ChatTerms
from jaxinfer.serve.grpc import chat as chats
from tests.serve.grpc.running import failure
from tests.serve.grpc.speaking import Speaking, speaking
from tests.serve.http.test_messages import CALL, THOUGHT, TOOLS
from tests.text.test_contents import NOT_TEXT

CALLED = '{"city": "Zürich 🦊"}'
ANSWER = f"{THOUGHT}Let me see.\n{CALL}\n{CALL}"
PARSED = {
    "text": "Let me see.\n",
    "reasoning": "I need the weather.",
    "calls": [("weather", CALLED)] * 2,
    "reason": pb.FINISH_REASON_TOOL_CALLS,
}


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 30))


def asked(tools: bool = True, **chat: Any) -> pb.GenerateRequest:
    """Return a chat request with parsed output, unless other fields are given."""
    message = pb.ChatMessage(role="user", content="How is the weather in Zürich?")
    sampling = pb.SamplingParams(**chat.pop("sampling", {}))
    made = pb.Chat(messages=[message], **{"parse": True, **chat})
    for tool in TOOLS if tools else ():
        made.tools.add().update(tool)
    return pb.GenerateRequest(chat=made, sampling=sampling)


def collected(deltas: list[pb.Delta]) -> dict[str, Any]:
    """Return the message that a client assembles from one output's deltas."""
    found: dict[str, Any] = {"text": "", "reasoning": "", "calls": [], "reason": None}
    for delta in deltas:
        found["text"] += delta.text
        found["reasoning"] += delta.reasoning
        for call in delta.tool_calls:
            if call.index == len(found["calls"]):
                assert call.id
                found["calls"].append([call.name, ""])
            else:
                assert not call.HasField("id")
                assert not call.HasField("name")
            found["calls"][call.index][1] += call.arguments
        if delta.HasField("finish_reason"):
            found["reason"] = delta.finish_reason
    return {**found, "calls": [tuple(call) for call in found["calls"]]}


async def answer(server: Speaking, request: pb.GenerateRequest) -> dict[str, Any]:
    events = [event async for event in server.inference.Generate(request)]
    return collected([event.delta for event in events[1:-1]])


def test_thoughts_and_calls_have_fields_of_their_own() -> None:
    async def story() -> None:
        async with speaking(ANSWER) as server:
            assert await answer(server, asked()) == PARSED

    run(story)


def test_a_stream_brings_them_as_they_are_made() -> None:
    async def story() -> None:
        async with speaking(ANSWER) as server:
            events = [event async for event in server.inference.Generate(asked())]
            parts = [event.delta for event in events if event.delta.tool_calls]
            assert len(parts) > 4
            assert len({call.id for delta in parts for call in delta.tool_calls if call.HasField("id")}) == 2

    run(story)


@pytest.mark.parametrize("chat", [{"parse": False}, {}])
def test_unless_it_is_asked_for_text_is_all_that_the_model_says(chat: dict[str, Any]) -> None:
    async def story() -> None:
        said = CALL if chat else ANSWER
        async with speaking(said) as server:
            request = asked(**chat)
            if not chat:
                request.chat.ClearField("parse")
            plain = said.replace("<think>", "").replace("</think>", "")  # special tokens are hidden as usual
            found = await answer(server, request)
            assert found == {"text": plain, "reasoning": "", "calls": [], "reason": pb.FINISH_REASON_STOP}

    run(story)


def test_a_batch_is_read_too_each_request_as_it_asks() -> None:
    async def story() -> None:
        async with speaking(ANSWER) as server:
            requests = [asked(), asked(parse=False), asked(tools=False)]
            for index, request in enumerate(requests):
                request.request_id = str(index)
            deltas: dict[str, list[pb.Delta]] = {}
            async for event in server.inference.GenerateBatch(iter(requests)):
                if event.WhichOneof("event") == "delta":
                    deltas.setdefault(event.request_id, []).append(event.delta)
            found = {name: collected(each) for name, each in deltas.items()}
            assert found["0"] == PARSED
            assert found["1"]["text"].count("<tool_call>") == 2
            text = f"Let me see.\n{CALL}\n{CALL}"
            assert (found["2"]["reasoning"], found["2"]["text"]) == ("I need the weather.", text)

    run(story)


def test_outputs_are_read_each_by_itself() -> None:
    async def story() -> None:
        async with speaking(THOUGHT + CALL) as server:
            events = [event async for event in server.inference.Generate(asked(sampling={"n": 3}))]
            for index in range(3):
                mine = [event.delta for event in events[1:-1] if event.delta.output_index == index]
                assert collected(mine)["calls"] == [("weather", CALLED)]

    run(story)


def test_parts_can_be_left_out() -> None:
    async def story() -> None:
        async with speaking(ANSWER) as server:
            assert await answer(server, asked(include_reasoning=False)) == {**PARSED, "reasoning": ""}
            assert await answer(server, asked(parallel_tool_calls=False)) == {**PARSED, "calls": [("weather", CALLED)]}
            hidden = await answer(server, asked(tool_choice=pb.ToolChoice(mode=pb.TOOL_MODE_NONE)))
            assert hidden["calls"] == []
            assert CALL in hidden["text"]

    run(story)


def test_a_cut_answer_says_length_and_log_probabilities_are_of_all_tokens() -> None:
    async def story() -> None:
        async with speaking(CALL) as server:
            found = await answer(server, asked(sampling={"max_tokens": 60}))
            assert found["reason"] == pb.FINISH_REASON_LENGTH
            assert CALLED.startswith(found["calls"][0][1])
            events = [event async for event in server.inference.Generate(asked(sampling={"logprobs": 0}))]
            deltas = [event.delta for event in events[1:-1]]
            tokens = sum(len(delta.token_ids) for delta in deltas)
            assert sum(len(delta.logprobs) for delta in deltas) == tokens > len(CALL)

    run(story)


def test_the_prompt_is_that_of_the_typed_messages() -> None:
    """The prompt has the typed messages with calls, results and reasoning; ``effort`` disables thinking."""

    async def story() -> None:
        async with speaking("Yes.") as server:
            messages = [
                pb.ChatMessage(role="assistant", reasoning="Hm.", tool_calls=[pb.ToolCall(**CALL_FIELDS)]),
                pb.ChatMessage(role="tool", tool_call_id="a", content="sunny"),
            ]
            chat = pb.Chat(messages=messages, reasoning_effort="none")
            ids = (await server.inference.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids
            text = (await server.inference.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text
            call = json.dumps({"name": "weather", "arguments": json.loads(CALLED)}, ensure_ascii=False)
            assert text == (
                f"[assistant]<think>Hm.</think><tool_call>{call}</tool_call>[tool]sunny[assistant]<think></think>"
            )

    run(story)


def test_tools_that_may_not_be_called_are_not_in_the_prompt() -> None:
    async def story() -> None:
        async with speaking("Yes.") as server:
            lengths = []
            for mode in (pb.TOOL_MODE_AUTO, pb.TOOL_MODE_NONE):
                chat = asked(tool_choice=pb.ToolChoice(mode=mode)).chat
                lengths.append(len((await server.inference.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids))
            chat = asked(tools=False).chat
            bare = await server.inference.Tokenize(pb.TokenizeRequest(chat=chat))
            assert lengths[0] > lengths[1] == len(bare.token_ids)

    run(story)


CALL_FIELDS = {"id": "a", "name": "weather", "arguments": CALLED}
REQUIRED, UNSPECIFIED = pb.TOOL_MODE_REQUIRED, pb.TOOL_MODE_UNSPECIFIED
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": pb.ToolChoice()}, "chat.tool_choice", "is not set: give one of mode, function, allowed"),
    ({"tool_choice": pb.ToolChoice(mode=UNSPECIFIED)}, "chat.tool_choice.mode", "=0 must be one of TOOL_MODE_AUTO"),
    (
        {"tool_choice": pb.ToolChoice(allowed=pb.AllowedTools(functions=["f"]))},
        "chat.tool_choice.allowed.mode",
        "=0 must be one of",
    ),
    ({"tool_choice": pb.ToolChoice(function="other")}, "chat.tool_choice", "'other' is no function of tools"),
    (
        {"tool_choice": pb.ToolChoice(allowed=pb.AllowedTools(mode=REQUIRED, functions=["weather"])), "parse": False},
        "chat.tool_choice",
        "needs parse=true",
    ),
    ({"parse": False, "parallel_tool_calls": False}, "chat.parallel_tool_calls", "=False needs parse=true"),
    ({"parse": False, "include_reasoning": False}, "chat.include_reasoning", "=False needs parse=true"),
    ({"reasoning_effort": "lots"}, "chat.reasoning_effort", "='lots' must be one of none, minimal, low"),
    ({"reasoning_effort": "high"}, "chat.reasoning_effort", "='high': the model's chat template knows no such effort"),
]


@pytest.mark.parametrize(("chat", "field", "reason"), REFUSED)
def test_what_is_not_served_is_refused_by_field_and_value(chat: dict[str, Any], field: str, reason: str) -> None:
    async def story() -> None:
        async with speaking(ANSWER) as server:
            refused = await failure(server.inference.Generate(asked(**chat)))
            assert refused.message.startswith(field)
            assert reason in refused.message
            assert refused.violations == {field: refused.message}

    run(story)


def test_calls_without_a_parser_are_text_and_cannot_be_counted() -> None:
    async def story() -> None:
        async with speaking(CALL, parsers=Parsers()) as server:
            assert (await answer(server, asked()))["text"] == CALL
            refused = await failure(server.inference.Generate(asked(parallel_tool_calls=False)))
            assert "chat.parallel_tool_calls=False is not served: no parser" in refused.message

    run(story)


TEXT = st.text(max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | TEXT | st.integers(-(2**70), 2**70) | st.just(0.5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(TEXT, TEXT, JSON), max_size=3)


@given(CALLS, st.none() | TEXT, st.none() | TEXT, st.dictionaries(st.sampled_from("abc"), TEXT))
def test_typed_messages_keep_what_they_hold(
    calls: list[tuple[str, str, Any]], call_id: str | None, thought: str | None, fields: dict[str, str]
) -> None:
    typed = [pb.ToolCall(id=name_id, name=name, arguments=json.dumps(found)) for name_id, name, found in calls]
    message = pb.ChatMessage(role="tool", tool_calls=typed, tool_call_id=call_id, reasoning=thought)
    message.fields.update(fields)
    sent = pb.Chat.FromString(pb.Chat(messages=[message]).SerializeToString())
    expected: dict[str, Any] = {"role": "tool", "content": None if calls else "", **fields}
    if calls:
        shapes = [(i, {"name": name, "arguments": arguments_of(json.dumps(found))}) for i, name, found in calls]
        expected["tool_calls"] = [{"id": i, "type": "function", "function": shape} for i, shape in shapes]
    if call_id is not None:
        expected["tool_call_id"] = call_id
    if thought is not None:
        expected |= {"reasoning": thought, "reasoning_content": thought}
    assert chats.conversation_of(sent) == Conversation(messages=[expected])


@pytest.mark.parametrize(
    ("message", "field", "reason"),
    [
        ({"reasoning": "a", "fields": {"reasoning": "b"}}, "chat.messages[0].fields", "reasoning is set by its own"),
        ({"tool_call_id": "a", "fields": {"tool_call_id": "b"}}, "chat.messages[0].fields", "tool_call_id is set"),
    ],
)
def test_typed_messages_that_nobody_can_read_are_refused(message: dict[str, Any], field: str, reason: str) -> None:
    fields = message.pop("fields", {})
    made = pb.ChatMessage(role="assistant", **message)
    made.fields.update(fields)
    with pytest.raises(ServeError, match=reason) as refused:
        chats.conversation_of(pb.Chat(messages=[made]))
    assert (refused.value.kind, refused.value.field) == (Kind.INVALID, field)


@pytest.mark.parametrize(("content", "where"), [each for each in NOT_TEXT if not isinstance(each[0], bytes)])
def test_contents_that_are_no_text_are_refused(content: Any, where: str) -> None:
    made = pb.ChatMessage(role="user")
    made.fields.update({"content": content})
    with pytest.raises(ServeError) as refused:
        chats.conversation_of(pb.Chat(messages=[pb.ChatMessage(role="user", content="a"), made]))
    assert (refused.value.kind, refused.value.field) == (Kind.INVALID, f"chat.messages[1]{where}")


@pytest.mark.parametrize(
    ("content", "text"), [([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"), (None, "")]
)
def test_contents_in_parts_are_text(content: Any, text: str) -> None:
    made = pb.ChatMessage(role="user")
    made.fields.update({"content": content})
    assert chats.conversation_of(pb.Chat(messages=[made])).messages == [{"role": "user", "content": text}]


def test_choices_have_the_shapes_that_http_has() -> None:
    function = {"type": "function", "function": {"name": "f"}}
    for choice, shape in (
        (pb.ToolChoice(mode=pb.TOOL_MODE_AUTO), "auto"),
        (pb.ToolChoice(mode=REQUIRED), "required"),
        (pb.ToolChoice(function="f"), function),
        (
            pb.ToolChoice(allowed=pb.AllowedTools(mode=pb.TOOL_MODE_AUTO, functions=["f"])),
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function]}},
        ),
    ):
        assert chats.terms_of(pb.Chat(tool_choice=choice), None) == ChatTerms(tool_choice=shape)
