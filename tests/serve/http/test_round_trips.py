"""Tests that the server accepts its own responses: 50 answers, cut at every ``max_tokens``, over three APIs.

The APIs' own writers produce the responses from one-byte tokens, the APIs' own request bodies read them, and the
template renders them. Two turns over HTTP check the rest of the path.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import types
from collections.abc import Iterator
from typing import Any

import pytest

from jaxinfer.parsers.registry import Parsers
from jaxinfer.serve.api.requests import Conversation, Usage
from jaxinfer.serve.frontend.chat.messages import arguments_of
from jaxinfer.serve.frontend.chat.outputs import outputs_of
from jaxinfer.serve.http import prompts
from jaxinfer.serve.http.anthropic import inputs as anthropic
from jaxinfer.serve.http.anthropic.answer import MessageWriter
from jaxinfer.serve.http.anthropic.bodies import MessagesRequest
from jaxinfer.serve.http.choices import ResponseFields
from jaxinfer.serve.http.completions import Chat, MessageChoice
from jaxinfer.serve.http.fields import checked
from jaxinfer.serve.http.requests import ChatCompletionRequest
from jaxinfer.serve.http.responses import inputs as responses
from jaxinfer.serve.http.responses.answer import ResponseWriter
from jaxinfer.serve.http.responses.bodies import ResponsesRequest
from jaxinfer.serve.workers.normalize import normalize_messages, written
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.output import OutputDelta
from jaxinfer.types import FinishReason
from tests.serve.http.scripted import QWEN, speaking, tokenizer
from tests.serve.http.support import run

STRICT = """\
{%- if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}
{%- for m in messages %}{{ '[' + m.role + ']' + m.content }}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content + '</think>' }}{% endif %}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.name + ':' }}
{%- for name, value in c.function.arguments.items() %}{{ name + '=' + (value | tojson) }}{% endfor %}</tool_call>
{%- endfor %}
{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
"""Template that fails on non-text content and on arguments that are not an object, like those of GLM and MiniMax."""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
HI = {"role": "user", "content": "Hi"}

_ARGUMENTS = (
    *('{"city": "Rome"}', "{}", "[1, 2]", '"Rome"', "null", "7", '{"city": NaN}', '{"a": 1, "a": 2}'),
    *('{"city": "\\ud83d"}', '{"city": "Z\\u00fcrich 🦊"}', '{"a": {"b": [{"c": null}]}}', "Rome", '{"city": "Rome}'),
)
_CALLS = [f'<tool_call>\n{{"name": "weather", "arguments": {each}}}\n</tool_call>' for each in _ARGUMENTS]
_THOUGHTS = ("", "<think>\nHm 🦊.\n</think>\n\n", "<think>\n", "</think>")
_TEXTS = ("", "Yes.", "Ça va? <tool", " \n ", "I will not. [refusal] None")
ANSWERS = list(
    itertools.islice(
        dict.fromkeys(
            thought + text + call
            for call, text, thought in [
                *itertools.product(("", _CALLS[0]), _TEXTS, _THOUGHTS),
                *itertools.product(_CALLS[1:], ("", "See: "), ("",)),
                *itertools.product((_CALLS[0] + "\n" + _CALLS[1],), ("",), _THOUGHTS),
            ]
            if thought + text + call
        ),
        50,
    )
)
TOKENS = tokenizer()


def cut_answers() -> Iterator[tuple[str, OutputDelta]]:
    """Yield each answer at each ``max_tokens``, in one delta."""
    for answer in ANSWERS:
        ids = TOKENS.encode(answer, add_special_tokens=False)
        for most in range(1, len(ids) + 1):
            reason = FinishReason.STOP if most == len(ids) else FinishReason.LENGTH
            text = TOKENS.decode(ids[:most], skip_special_tokens=False)
            yield answer, OutputDelta(0, text, list(ids[:most]), [], reason, None)


@dataclasses.dataclass
class Spoken:
    """Stand-in for the state of an answered request that the writers need."""

    body: ChatCompletionRequest

    @property
    def chat(self) -> Chat:
        words = types.SimpleNamespace(token_bytes=TOKENS.token_bytes, token_text=lambda token: "")
        card = types.SimpleNamespace(name="fake", defaults={})
        frontend: Any = types.SimpleNamespace(tokenizer=TOKENS, card=card, **vars(words))
        generation: Any = types.SimpleNamespace(prompt_token_ids=[5], n=1, lora=None, usage=Usage(1, 1, 0))
        return Chat(frontend, self.body, "id", generation, Parsers("hermes", "qwen3"))


def over_chat(delta: OutputDelta) -> list[dict[str, Any]]:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    chat = Spoken(checked(ChatCompletionRequest, {"messages": [HI], "tools": tools})).chat
    (output,) = outputs_of(chat.generation, chat.terms, chat.parsers, TOKENS, TOKENS.token_bytes)
    assert output is not None
    choice = MessageChoice(0, chat.frontend, ResponseFields(), output, ("reasoning", "reasoning_content"))
    choice.take(delta)
    message = json.loads(json.dumps(choice.whole()["message"]))
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "x"} for c in message.get("tool_calls", [])]
    forms = [message, {name: value for name, value in message.items() if value is not None}]
    for gone in ("reasoning", "reasoning_content"):
        forms.append({name: value for name, value in message.items() if name != gone})
    return [{"messages": [HI, form, *results, HI], "tools": tools} for form in forms]


def over_responses(delta: OutputDelta) -> list[dict[str, Any]]:
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    body = checked(ResponsesRequest, {"input": [HI], "tools": tools})
    writer = ResponseWriter(body, Spoken(as_chat(responses.messages_of(body), responses._tools(body))).chat)
    writer.take(delta)
    items = json.loads(json.dumps(writer.whole()))["output"]
    made = [item["call_id"] for item in items if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": each, "output": "x"} for each in made]
    return [{"input": [HI, *items, *results, HI], "tools": tools}]


def over_messages(delta: OutputDelta) -> list[dict[str, Any]]:
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    body = checked(MessagesRequest, {"messages": [HI], "tools": tools, "max_tokens": 9})
    writer = MessageWriter(Spoken(as_chat(anthropic.messages_of(body), anthropic._tools(body))).chat, 9, "id")
    writer.take(delta)
    message = json.loads(json.dumps(writer.whole(), allow_nan=False))
    results = [{"type": "tool_result", "tool_use_id": b["id"]} for b in message["content"] if b["type"] == "tool_use"]
    turn = {"role": "user", "content": [*results, {"type": "text", "text": "Hi"}]}
    return [{"messages": [HI, said, turn]} for said in ({"role": "assistant", "content": message["content"]}, message)]


def as_chat(messages: list[dict[str, Any]], tools: Any) -> ChatCompletionRequest:
    return checked(ChatCompletionRequest, {"messages": messages, "tools": tools})


def read_chat(body: dict[str, Any]) -> ChatCompletionRequest:
    return checked(ChatCompletionRequest, body)


def read_responses(body: dict[str, Any]) -> ChatCompletionRequest:
    return as_chat(responses.messages_of(checked(ResponsesRequest, body)), None)


def read_messages(body: dict[str, Any]) -> ChatCompletionRequest:
    return as_chat(anthropic.messages_of(checked(MessagesRequest, {**body, "max_tokens": 9})), None)


DOORS = {
    "chat": (over_chat, read_chat),
    "responses": (over_responses, read_responses),
    "messages": (over_messages, read_messages),
}


def rendered(conversation: Conversation, template: ChatTemplate) -> str:
    shown = normalize_messages(conversation, list(template.sources.values()))
    return written(shown.messages, lambda messages: template.render(messages, True, shown.tools))


@pytest.mark.parametrize("door", DOORS)
def test_every_answer_is_accepted_and_shown(door: str) -> None:
    answer, read = DOORS[door]
    templates, count = list(map(ChatTemplate, (QWEN, STRICT))), 0
    for text, delta in cut_answers():
        for body in answer(delta):
            conversation = prompts._conversation(read(json.loads(json.dumps(body))))
            for template in templates:
                prompt = rendered(conversation, template)
                assert prompt.count("[user]Hi") >= 1, (text, delta.text)
                assert prompt.endswith("[assistant]"), (text, delta.text)
                assert "None" not in prompt.replace("[refusal] None", ""), (text, delta.text)
                for message in conversation.messages:
                    assert (message["content"] or "") in prompt, (text, delta.text)
                    assert message.get("reasoning_content", "") in prompt, (text, delta.text)
                    assert prompt.count("<tool_call>") >= len(message.get("tool_calls", [])), (text, delta.text)
        count += 1
    assert count > 1500


def test_there_are_fifty_answers() -> None:
    assert len(ANSWERS) == 50
    assert all(arguments_of(each) is not None for each in _ARGUMENTS)


PATHS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"messages": [HI]}, "max_tokens"),
    "responses": ("/v1/responses", {"input": [HI]}, "max_output_tokens"),
    "messages": ("/v1/messages", {"messages": [HI]}, "max_tokens"),
}
SAID = f"<think>\nHm.\n</think>\n\nSee: {_CALLS[0]}"


@pytest.mark.parametrize("door", DOORS)
def test_the_same_over_http(door: str) -> None:
    """Over HTTP, the next turn accepts the message, cut at every eighth token."""

    async def test() -> None:
        path, first, limit = PATHS[door]
        async with speaking(SAID) as running, running.http() as client:
            for most in range(1, len(SAID), 8):
                tools = TOOLS[door]
                asked = {**first, limit: most, "tools": tools}
                answer = (await client.post(path, json=asked)).json()
                assert (await client.post(path, json={**asked, **NEXT[door](answer), limit: 1})).status_code == 200

    run(test)


TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
    "responses": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
    "messages": [{"name": "weather", "input_schema": SCHEMA}],
}
NEXT = {
    "chat": lambda answer: {"messages": [HI, answer["choices"][0]["message"], HI]},
    "responses": lambda answer: {"input": [HI, *answer["output"], HI]},
    "messages": lambda answer: {"messages": [HI, answer, HI]},
}
