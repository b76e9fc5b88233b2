"""Tests of agent loops with tool calls: one model, and the official client of each API."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import pytest

from tests.serve.http.scripted import speaking
from tests.serve.http.support import BOUND, Running, run

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
QUESTION = "Is it warmer in Rome or in Zürich?"


def call(city: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


# Two parallel calls, one more call after their results, and then an answer.
SAID = (
    f"<think>\nI need both.\n</think>\n\nLet me see.{call('Rome')}\n{call('Zürich 🦊')}",
    f"<think>\nOnce more.\n</think>\n\n{call('Rome')}",
    "<think>\nSo.\n</think>\n\nIn Rome.",
)
CALLS = ["Rome", "Zürich 🦊", "Rome"]


class Tools:
    """The client's tools: runs functions and records their arguments."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def weather(self, city: str) -> str:
        self.calls.append(city)
        return f"{len(self.calls)}° in {city}"


async def over_chat(running: Running, tools: Tools) -> str:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    given: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    async with running.openai() as client:
        while True:
            answer = await client.chat.completions.create(model="fake", messages=messages, tools=given)
            message = answer.choices[0].message
            messages.append(in_order(message.model_dump(exclude_none=True)))
            if not message.tool_calls:
                return message.content or ""
            for each in message.tool_calls:
                assert each.type == "function"
                found = tools.weather(**json.loads(each.function.arguments))
                messages.append({"role": "tool", "tool_call_id": each.id, "content": found})


def in_order(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with function fields in the other APIs' order, because the template prints the objects."""
    for each in message.get("tool_calls", []):
        function = each["function"]
        each["function"] = {"name": function["name"], "arguments": function["arguments"]}
    return message


async def over_responses(running: Running, tools: Tools) -> str:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    given: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": None}]
    async with running.openai() as client:
        while True:
            response = await client.responses.create(model="fake", input=items, tools=given)
            items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            for each in calls:
                found = tools.weather(**json.loads(each.arguments))
                items.append({"type": "function_call_output", "call_id": each.call_id, "output": found})


async def over_streamed_responses(running: Running, tools: Tools) -> str:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    given: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": None}]
    async with running.openai() as client:
        while True:
            async with client.responses.stream(model="fake", input=items, tools=given) as stream:
                response = await stream.get_final_response()
            items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            for each in calls:
                found = tools.weather(**json.loads(each.arguments))
                items.append({"type": "function_call_output", "call_id": each.call_id, "output": found})


async def over_messages(running: Running, tools: Tools) -> str:
    return await _messages(running, tools, stream=False)


async def over_streamed_messages(running: Running, tools: Tools) -> str:
    return await _messages(running, tools, stream=True)


async def _messages(running: Running, tools: Tools, *, stream: bool) -> str:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    given: Any = [{"name": "weather", "input_schema": SCHEMA}]
    asked: dict[str, Any] = {"model": "fake", "max_tokens": 400, "tools": given, "messages": messages}
    async with anthropic.AsyncAnthropic(base_url=running.url, api_key="none", max_retries=0, timeout=BOUND) as client:
        while True:
            if stream:
                async with client.messages.stream(**asked) as events:
                    message: Any = await events.get_final_message()
            else:
                message = await client.messages.create(**asked)
            if message.stop_reason != "tool_use":
                return "".join(block.text for block in message.content if block.type == "text")
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": tools.weather(**block.input)}
                for block in message.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "assistant", "content": message.content})
            messages.append({"role": "user", "content": results})


LOOPS = [over_chat, over_responses, over_streamed_responses, over_messages, over_streamed_messages]


async def prompts(loop: Callable[[Running, Tools], Awaitable[str]]) -> list[str]:
    """Return the prompt of each turn."""
    tools, seen = Tools(), []
    async with speaking(*SAID) as running:
        generate = running.frontend.generate

        async def watched(*args: Any) -> Any:
            generation = await generate(*args)
            seen.append(await running.frontend.detokenize(generation.prompt_token_ids))
            return generation

        running.frontend.generate = watched  # type: ignore[method-assign]
        assert await loop(running, tools) == "In Rome."
    assert tools.calls == CALLS
    return seen


@pytest.mark.parametrize("loop", LOOPS)
def test_an_agent(loop: Callable[[Running, Tools], Awaitable[str]]) -> None:
    async def test() -> None:
        seen = await prompts(loop)
        assert len(seen) == len(SAID)
        last = seen[-1]
        assert "[assistant]<think>I need both.</think>Let me see.<tool_call>" in last
        assert "[assistant]<think>Once more.</think><tool_call>" in last
        for rank, city in enumerate(CALLS):
            assert f"[tool]{rank + 1}° in {city}" in last
            assert f'"arguments": {{"city": "{city}"}}' in last
        assert last.endswith("[assistant]")

    run(test)


def test_every_door_shows_the_model_the_same() -> None:
    async def test() -> None:
        wanted = await prompts(over_chat)
        for loop in LOOPS[1:]:
            assert await prompts(loop) == wanted, loop

    run(test)
