"""Tests of the conversion of Anthropic's messages, blocks and tools to a chat, and of inputs that are rejected."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.serve.api.errors import ServeError
from jaxinfer.serve.api.ignored import collecting
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.http.anthropic.bodies import MessagesRequest
from jaxinfer.serve.http.anthropic.inputs import chat_of, messages_of
from jaxinfer.serve.http.fields import checked
from jaxinfer.serve.http.requests import ChatCompletionRequest
from tests.serve.http.scripted import QWEN, speaking
from tests.serve.http.support import run, serving

TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"x": {"default": None}}}}
HI = {"role": "user", "content": "Hi"}
BASE: dict[str, Any] = {"max_tokens": 5, "messages": [HI]}


def body_of(**fields: Any) -> MessagesRequest:
    with collecting():
        return checked(MessagesRequest, {**BASE, **fields})


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}


def test_blocks_become_messages() -> None:
    found = messages_of(
        body_of(
            system=[text("Be brief."), text("Be kind.")],
            messages=[
                HI,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": ""},
                        text("Well."),
                        {"type": "tool_use", "id": "c", "name": "f", "input": {"x": [1]}},
                        {"type": "tool_use", "id": "d", "name": "g", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c", "content": [text("2")]},
                        {"type": "tool_result", "tool_use_id": "d", "is_error": True},
                        text("And?"),
                    ],
                },
                {"role": "user", "content": "Well?"},
                {"role": "system", "content": "Be quick."},
            ],
        )
    )
    made = [("c", "f", {"x": [1]}), ("d", "g", {})]
    calls = [{"id": a, "type": "function", "function": {"name": b, "arguments": c}} for a, b, c in made]
    assert found == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Well.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
        {"role": "tool", "content": "", "tool_call_id": "d"},
        {"role": "user", "content": "And?\nWell?"},
        {"role": "system", "content": "Be quick."},
    ]


WORD = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)
ARGUMENTS = st.dictionaries(WORD, st.integers(), max_size=2)
SPOKEN = WORD.map(text)
USER = SPOKEN | WORD.map(lambda said: {"type": "tool_result", "tool_use_id": "c", "content": said})
CALL = st.tuples(WORD, ARGUMENTS).map(lambda call: {"type": "tool_use", "id": "c", "name": call[0], "input": call[1]})
ASSISTANT = SPOKEN | CALL | WORD.map(lambda said: {"type": "thinking", "thinking": said})


def turn(role: str, blocks: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.lists(blocks, min_size=1, max_size=5).map(lambda content: {"role": role, "content": content})


@given(st.lists(turn("user", USER) | turn("assistant", ASSISTANT), max_size=5))
def test_nothing_is_lost_and_the_order_stays(messages: list[dict[str, Any]]) -> None:
    found = messages_of(body_of(messages=[*messages, HI]))
    blocks = [(each["role"], block) for each in messages for block in each["content"]]

    def said(role: str, kind: str, name: str) -> str:
        return "".join(block[name] for who, block in blocks if (who, block["type"]) == (role, kind)).replace("\n", "")

    def kept(role: str, name: str = "content") -> str:
        return "".join(each.get(name) or "" for each in found if each["role"] == role).replace("\n", "")

    assert kept("user") == said("user", "text", "text") + "Hi"
    assert kept("assistant") == said("assistant", "text", "text")
    assert kept("assistant", "reasoning_content") == said("assistant", "thinking", "thinking")
    assert kept("tool") == said("user", "tool_result", "content")
    calls = [call["function"] for each in found for call in each.get("tool_calls", [])]
    made = [block for _, block in blocks if block["type"] == "tool_use"]
    assert calls == [{"name": each["name"], "arguments": each["input"]} for each in made]
    roles = [each["role"] for each in found]
    assert not any(a == b and a != "tool" for a, b in itertools.pairwise(roles))


async def chat(template: str = QWEN, **fields: Any) -> ChatCompletionRequest:
    async with speaking("Hi", template=template) as running:
        return await chat_of(body_of(**fields), ServeLimits(), running.frontend)


def test_the_rest_of_a_body_is_a_chats() -> None:
    async def test() -> None:
        made = await chat(
            tools=[{**TOOL, "type": "custom", "description": "d", "strict": True}, {**TOOL, "type": None}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            stop_sequences=["x"],
            output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
            top_k=3,
            metadata={"user_id": "me"},
        )
        function = {"name": "f", "parameters": TOOL["input_schema"]}
        strict = {**function, "description": "d", "strict": True}
        assert made.tools == [{"type": "function", "function": each} for each in (strict, function)]
        assert (made.tool_choice, made.parallel_tool_calls) == ("required", False)
        assert (made.stop, made.max_tokens, made.top_k, made.reasoning_effort) == (["x"], 5, 3, "low")
        schema = {"name": "output", "schema": {"type": "object"}}
        assert made.response_format == {"type": "json_schema", "json_schema": schema}

    run(test)


@pytest.mark.parametrize(
    ("choice", "made", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "none"}, "none", None),
        ({"type": "any"}, "required", None),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, None),
        ({"type": "auto", "disable_parallel_tool_use": False}, "auto", None),
        ({"type": "tool", "name": "f", "disable_parallel_tool_use": True}, {"function": {"name": "f"}}, False),
    ],
)
def test_choices_are_those_of_a_chat(choice: Any, made: Any, parallel: bool | None) -> None:
    async def test() -> None:
        found = await chat(tools=[TOOL], tool_choice=choice)
        wanted = {"type": "function", **made} if isinstance(made, dict) else made
        assert (found.tool_choice, found.parallel_tool_calls) == (wanted, parallel)

    run(test)


BOTH = {"enable_thinking": True, "thinking": True}  # one name is a substring of the other
EFFORTS = "{{ messages }}</think>{{ reasoning_effort }}"
SILENT = "{{ messages }}"


@pytest.mark.parametrize(
    ("template", "thinking", "effort", "variables"),
    [
        (QWEN, {"type": "enabled", "budget_tokens": 2000}, None, BOTH),
        (QWEN, {"type": "disabled"}, "none", None),
        (QWEN, {"type": "adaptive"}, None, None),
        (EFFORTS, {"type": "disabled"}, "none", None),
        (EFFORTS, {"type": "enabled", "budget_tokens": 2000}, None, {}),  # the model thinks by default
        (SILENT, {"type": "disabled"}, None, None),
        (SILENT, {"type": "adaptive", "display": "summarized"}, None, None),
    ],
)
def test_thinking_is_the_templates(template: str, thinking: Any, effort: str | None, variables: Any) -> None:
    async def test() -> None:
        found = await chat(template, thinking=thinking)
        assert (found.reasoning_effort, found.chat_template_kwargs) == (effort, variables)
        assert found.thinking_token_budget == thinking.get("budget_tokens")

    run(test)


@pytest.mark.parametrize(
    ("template", "thinking", "said"),
    [
        (SILENT, {"type": "enabled", "budget_tokens": 2000}, "thinking.type='enabled' is not served: the model is not"),
        ("{{ messages }}</think>", {"type": "disabled"}, "thinking.type='disabled' is not served: the model's chat"),
        (QWEN, {"type": "between_tools"}, "thinking.type='between_tools' is not served: it may be adaptive"),
        (QWEN, {"type": "enabled", "budget_tokens": "8"}, "thinking.budget_tokens='8'"),
        (QWEN, {"type": "adaptive", "display": "all"}, "thinking.display='all'"),
    ],
)
def test_thinking_that_a_template_cannot_be_told_is_refused(template: str, thinking: Any, said: str) -> None:
    async def test() -> None:
        with pytest.raises(ServeError) as refused:
            await chat(template, thinking=thinking)
        assert refused.value.message.startswith(said)

    run(test)


def test_variables_of_a_request_stand_above_the_switch() -> None:
    async def test() -> None:
        found = await chat(thinking={"type": "enabled"}, chat_template_kwargs={"enable_thinking": False, "x": 1})
        assert found.chat_template_kwargs == {**BOTH, "enable_thinking": False, "x": 1}

    run(test)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
CONTENT = "messages[0].content"
REFUSED = [
    ({"max_tokens": ...}, "max_tokens is missing"),
    ({"max_tokens": None}, "max_tokens=None: input should be a valid integer"),
    ({"max_tokens": 5.0}, "max_tokens=5.0: input should be a valid integer"),
    ({"max_tokens": True}, "max_tokens=True: input should be a valid integer"),
    ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
    ({"messages": []}, "messages=[]"),
    ({"messages": ["Hi"]}, "messages[0]='Hi'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role='tool'"),
    ({"messages": [{**HI, "name": "x"}]}, "messages[0].name is not a field"),
    ({"messages": [{"role": "user", "content": 3}]}, f"{CONTENT}=3 must be text or a list of blocks"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, f"{CONTENT}[0].type=None is not served: it may be image"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, f"{CONTENT}[0].source is missing"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, f"{CONTENT}[0].type='image' is not served: the model reads"),
    ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, f"{CONTENT}[0].type='image' is not served: it may be"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, f"{CONTENT}[0].text is missing"),
    ({"messages": [{"role": "user", "content": [{**text("x"), "a": 1}]}]}, f"{CONTENT}[0].a is not a field"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, f"{CONTENT}[0].type='tool_use' is not"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": 3}]}]},
        f"{CONTENT}[0].content=3 must be text",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": "{}"}]}]},
        f"{CONTENT}[0].input='{{}}'",
    ),
    (
        {
            "messages": [
                HI,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            ]
        },
        "messages[1].content='tool_use' cannot be continued",
    ),
    ({"system": 3}, "system=3 must be text"),
    ({"system": [{"type": "image"}]}, "system[0].type='image' is not served"),
    ({"colour": "red"}, "colour is not a field of this request"),
    ({"container": "x"}, "container='x' is not served"),
    ({"mcp_servers": [{}]}, "mcp_servers=[{}] is not served"),
    ({"service_tier": "priority"}, "service_tier='priority' is not served"),
    ({"metadata": {"user": "x"}}, "metadata.user is not a field"),
    ({"temperature": -1}, "temperature=-1"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"thinking": {"budget_tokens": 1}}, "thinking.type=None"),
    ({"thinking": {"type": "adaptive", "budget_tokens": -1}}, "thinking.budget_tokens=-1 must be"),
    ({"output_config": {"effort": "none"}}, "output_config.effort='none'"),
    ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format.type='grammar' must be"),
    ({"output_config": {"format": {"type": "json_schema", "schema": 3}}}, "output_config.format.schema=3 must be"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
    ({"tools": [TOOL]}, "tools: the model's chat template has no place for tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "must"}}, "tool_choice.type='must' is not served"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "tool_choice.disable_parallel_tool_use=False is not served: no parser",
    ),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, "prompt is too long: 30"),
]


def test_bad_fields_are_named_with_their_values() -> None:
    async def test() -> None:
        async with serving() as running, running.http() as client:
            for changes, words in REFUSED:
                body = {name: value for name, value in {**BASE, **changes}.items() if value is not ...}
                answer = await client.post("/v1/messages", json=body)
                found = answer.json()
                assert answer.status_code == 400, (changes, found)
                assert found.keys() == {"type", "error", "request_id"}
                assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
                assert found["error"]["message"].startswith(words), found
                assert found["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
            assert running.frontend.active == 0

    run(test)


def test_what_asks_for_nothing_is_accepted() -> None:
    async def test() -> None:
        async with serving() as running, running.http() as client:
            harmless = {"metadata": {"user_id": "me"}, "service_tier": "auto", "container": None, "mcp_servers": []}
            harmless |= {"tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}, "system": [text("Hi")]}
            harmless |= {"cache_control": {"type": "ephemeral"}, "output_config": {"effort": None}}
            answer = await client.post("/v1/messages?beta=true", json={**BASE, **harmless})
            assert answer.status_code == 200, answer.text

    run(test)
