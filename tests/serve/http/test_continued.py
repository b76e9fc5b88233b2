"""Tests of continued assistant messages: by two fields in chats, and by a final assistant message in Messages."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from tests.serve.http.scripted import speaking
from tests.serve.http.support import BOUND, Running, run

HI = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


def begun(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


async def chat(running: Running, *messages: Any, **fields: Any) -> tuple[dict[str, Any], str]:
    """Return the message and the prompt."""
    asked = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True, **fields}
    async with running.http() as client:
        found = await client.post("/v1/chat/completions", json={"messages": messages, **asked})
        assert found.status_code == 200, found.text
        answer = found.json()
    return answer["choices"][0]["message"], await running.frontend.detokenize(answer["prompt_token_ids"])


def test_an_answer_goes_on() -> None:
    async def test() -> None:
        async with speaking(" the fox.", "see.\n</think>\n\nYes.", '": {"city": "Rome"}}\n</tool_call>') as running:
            message, prompt = await chat(running, HI, begun("I saw"))
            assert (message["content"], prompt) == (" the fox.", "[user]Hi[assistant]I saw")
            message, prompt = await chat(running, HI, begun("<think>\nI "))
            assert (message["reasoning"], message["content"]) == ("see.", "Yes.")
            assert prompt.endswith("[assistant]<think>\nI ")
            start = 'Let me see. <tool_call>\n{"name": "weather", "arguments'
            message, _ = await chat(running, HI, begun(start), tools=TOOLS, add_generation_prompt=None)
            (call,) = message["tool_calls"]
            assert (call["function"]["name"], message["content"]) == ("weather", None)
            assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}

    run(test)


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([HI], {}, "messages[0].role"),
        ([HI, begun("So")], {"add_generation_prompt": True}, "continue_final_message"),
        ([HI, begun(None, tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])], {}, "messages[1].tool_calls"),
    ],
)
def test_what_cannot_go_on(messages: list[Any], fields: dict[str, Any], param: str) -> None:
    async def test() -> None:
        async with speaking("Yes.") as running, running.http() as client:
            asked = {"messages": messages, "continue_final_message": True, **fields}
            found = await client.post("/v1/chat/completions", json=asked)
            assert (found.status_code, found.json()["error"]["param"]) == (400, param)

    run(test)


@pytest.mark.parametrize("content", ["I saw", [{"type": "text", "text": "I saw"}]])
def test_the_last_turn_of_the_assistant_goes_on(content: Any) -> None:
    async def test() -> None:
        async with speaking(" the fox.") as running:
            url, messages = running.url, [HI, begun(content)]
            async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=BOUND) as client:
                message = await client.messages.create(model="fake", max_tokens=50, messages=messages)  # type: ignore[arg-type]
                assert [block.text for block in message.content if block.type == "text"] == [" the fox."]
                counted = await client.messages.count_tokens(model="fake", messages=messages)  # type: ignore[arg-type]
                assert counted.input_tokens == message.usage.input_tokens == len("[user]Hi[assistant]I saw")
                async with client.messages.stream(model="fake", max_tokens=50, messages=messages) as stream:  # type: ignore[arg-type]
                    assert await stream.get_final_text() == " the fox."

    run(test)
