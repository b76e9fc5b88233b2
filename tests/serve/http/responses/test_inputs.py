"""Tests of the conversion of a response's input items to chat messages, and of inputs that are rejected."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.serve.api.errors import ServeError
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.http.fields import checked
from jaxinfer.serve.http.responses.bodies import ResponsesRequest
from jaxinfer.serve.http.responses.inputs import chat_of, messages_of
from tests.serve.http.support import run, serving

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"x": {"default": None}}}}
LOGPROBS = "message.output_text.logprobs"


def body_of(**fields: Any) -> ResponsesRequest:
    return checked(ResponsesRequest, fields)


def messages(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    return messages_of(body_of(input=list(items), **fields))


def said(text: str, kind: str = "output_text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": text, "annotations": []} if kind == "output_text" else {"type": kind, "text": text}]


def test_a_text_is_a_message_of_the_user_and_instructions_stand_in_front() -> None:
    found = messages_of(body_of(input="Hi", instructions="Be brief."))
    assert found == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def test_items_become_messages() -> None:
    found = messages(
        {"role": "developer", "content": said("Be brief.", "input_text")},
        {"type": "message", "role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": said("Hm.", "reasoning_text")},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": said("Well.")},
        {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": '{"x": [1]}'},
        {"type": "function_call_output", "call_id": "c", "output": said("2", "input_text")},
        {"type": "reasoning", "id": "rs_2", "summary": said("Short.", "summary_text")},
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": [1]}}}
    assert found == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Well.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
        {"role": "assistant", "content": "", "reasoning_content": "Short."},
    ]


WORD = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)
ITEM = st.one_of(
    WORD.map(lambda text: {"type": "reasoning", "summary": [], "content": said(text, "reasoning_text")}),
    WORD.map(lambda text: {"type": "message", "role": "assistant", "content": said(text)}),
    WORD.map(lambda text: {"type": "message", "role": "user", "content": text}),
    st.tuples(WORD, st.dictionaries(WORD, st.integers(), max_size=2)).map(
        lambda call: {"type": "function_call", "call_id": "c", "name": call[0], "arguments": json.dumps(call[1])}
    ),
)


@given(st.lists(ITEM, min_size=1, max_size=8))
def test_nothing_is_lost_and_the_order_stays(items: list[dict[str, Any]]) -> None:
    found = messages(*items)
    turns = [None] + [each.get("role") == "user" for each in items]
    assert len(found) == sum(user or user != before for before, user in itertools.pairwise(turns))
    texts = [part for each in found for part in (each["content"] or "").split("\n")]
    spoken = [each["content"] for each in items if each["type"] == "message"]
    wanted = [each if isinstance(each, str) else each[0]["text"] for each in spoken]
    assert "".join(texts) == "".join(wanted).replace("\n", "")
    thoughts = "\n".join(each["reasoning_content"] for each in found if "reasoning_content" in each)
    assert thoughts == "\n".join(each["content"][0]["text"] for each in items if each["type"] == "reasoning")
    calls = [call["function"] for each in found for call in each.get("tool_calls", [])]
    made = [each for each in items if each["type"] == "function_call"]
    assert calls == [{"name": each["name"], "arguments": json.loads(each["arguments"])} for each in made]


def test_the_rest_of_a_body_is_a_chats() -> None:
    async def test() -> None:
        schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}
        body = body_of(
            input="Hi",
            tools=[{**TOOL, "strict": True, "description": "d"}],
            tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            max_output_tokens=5,
            reasoning={"effort": "low", "summary": "auto"},
            text={"format": schema},
            include=[LOGPROBS],
            top_logprobs=2,
            temperature=0.5,
            seed=3,
        )
        chat = await chat_of(body, ServeLimits())
        function = {"name": "f", "description": "d", "parameters": TOOL["parameters"], "strict": True}
        assert chat.tools == [{"type": "function", "function": function}]
        named = {"type": "function", "function": {"name": "f"}}
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
        assert chat.tool_choice == allowed
        told = {"name": "a", "schema": {"type": "object"}, "strict": True}
        assert chat.response_format == {"type": "json_schema", "json_schema": told}
        assert (chat.max_tokens, chat.reasoning_effort, chat.temperature, chat.seed) == (5, "low", 0.5, 3)
        assert (chat.logprobs, chat.top_logprobs) == (True, 2)
        chosen = await chat_of(body_of(input="Hi", tool_choice={"type": "function", "name": "f"}), ServeLimits())
        assert chosen.tool_choice == named

    run(test)


HI = {"input": "Hi"}
USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
REFUSED = [
    ({}, "input", "input is missing"),
    ({"input": []}, "input", "input=[] must be text, or a list of items"),
    ({"input": 3}, "input", "input=3"),
    ({"input": ["Hi"]}, "input[0].type", "input[0].type=None is not served: it may be custom_tool_call"),
    ({"input": [USER, {"type": "item_reference", "id": "x"}]}, "input[1].type", "'item_reference' is not served"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "input[0].role='robot'"),
    ({"input": [{"role": "user"}]}, "input[0].content", "input[0].content is missing"),
    ({"input": [{"role": "user", "content": 3}]}, "input[0].content", "input[0].content=3"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "'input_image' is not served: the model reads text only",
    ),
    ({"input": [{"role": "assistant", "content": said("x", "input_text")}]}, "input[0].content[0].type", "output_text"),
    ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments", "input[0].arguments={}"),
    ({"input": [{**CALL, "colour": "red"}]}, "input[0].colour", "input[0].colour is not a field"),
    ({"input": [{**CALL, "type": "function_cal"}]}, "input[0].type", "did you mean function_call?"),
    (
        {**HI, "include": ["file_search.results"]},
        "include[0]",
        "'file_search.results' must be one of",
    ),
    ({**HI, "tools": [{"type": "web_serch"}]}, "tools[0].type", "it may be function: did you mean web_search?"),
    ({**HI, "tools": [{"type": "function", "name": "f", "parameter": {}}]}, "tools[0].parameter", "mean parameters?"),
    ({**HI, "colour": "red"}, "colour", "colour is not a field of this request"),
    ({**HI, "background": True}, "background", "background=True is not served"),
    ({**HI, "previous_response_id": "resp_1"}, "previous_response_id", "'resp_1' is not served"),
    ({**HI, "conversation": "conv_1"}, "conversation", "'conv_1' is not served"),
    ({**HI, "prompt": {"id": "x"}}, "prompt", "is not served"),
    ({**HI, "top_logprobs": 3}, "top_logprobs", "top_logprobs=3 needs include"),
    ({**HI, "include": [LOGPROBS], "top_logprobs": 99}, "top_logprobs", "top_logprobs=99"),
    ({**HI, "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens=0 must be"),
    ({**HI, "temperature": -1}, "temperature", "temperature=-1"),
    ({**HI, "metadata": {"a": 1}}, "metadata.a", "metadata.a=1"),
    ({**HI, "reasoning": {"effort": "much"}}, "reasoning.effort", "reasoning.effort='much'"),
    ({**HI, "text": {"format": {"type": "grammar"}}}, "text.format", "text.format.type='grammar' must be one of"),
    ({**HI, "text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format", "text.format.name=None must"),
    ({**HI, "tools": [{"type": "function"}]}, "tools[0].name", "tools[0].name is missing"),
    ({**HI, "tools": [TOOL]}, "tools", "tools: the model's chat template has no place for tools"),
    ({**HI, "tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls", "=False"),
    ({**HI, "model": "gpt-5"}, "model", "model='gpt-5'"),
    ({"input": "x" * 3000}, "input", "However, your input resulted in 30"),
]


def test_bad_fields_are_named_with_their_values() -> None:
    async def test() -> None:
        async with serving() as running, running.http() as client:
            for body, field, words in REFUSED:
                answer = await client.post("/v1/responses", json=body)
                error = answer.json()["error"]
                assert answer.status_code == (404 if field == "model" else 400), error
                assert error["param"] == field, error
                assert words in error["message"], error
            assert running.frontend.active == 0

    run(test)


def test_what_asks_for_nothing_is_accepted() -> None:
    async def test() -> None:
        async with serving() as running, running.http() as client:
            harmless = {"store": False, "background": False, "truncation": "disabled", "service_tier": "auto"}
            harmless |= {"user": "me", "safety_identifier": "me", "prompt_cache_key": "k", "tool_choice": "auto"}
            harmless |= {"reasoning": {"summary": "auto"}, "text": {"format": {"type": "text"}}, "max_output_tokens": 2}
            harmless |= {"include": ["reasoning.encrypted_content"], "previous_response_id": None}
            answer = await client.post("/v1/responses", json={**HI, **harmless})
            assert answer.status_code == 200, answer.text
            assert answer.json()["store"] is False

    run(test)


def test_more_items_than_a_conversation_may_have() -> None:
    async def test() -> None:
        with pytest.raises(ServeError, match="input must be at most 3, not 4") as refused:
            await chat_of(body_of(input=[USER] * 4), ServeLimits(messages=3))
        assert refused.value.field == "input"
        many = await chat_of(body_of(input=[USER] * 1000), ServeLimits())  # large enough for the thread pool
        assert len(many.messages) == 1000

    run(test)
