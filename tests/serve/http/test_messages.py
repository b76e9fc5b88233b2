"""Tests of tool calls and reasoning over HTTP with the official client: unary, streamed, and an agent loop."""

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest

from jaxinfer.parsers.registry import Parsers, chosen
from jaxinfer.parsers.response_template.template import read_template
from tests.serve.http.scripted import SPECIAL, speaking
from tests.serve.http.support import events, run, serving

MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather in Zürich?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🦊"}}\n</tool_call>'
THOUGHT = "<think>\nI need the weather.\n</think>\n\n"
ASKED: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "tools": TOOLS}


class Weather(pydantic.BaseModel):
    """Arguments of the tool."""

    city: str


async def collected(stream: Any) -> dict[str, Any]:
    """Return the message that a client assembles from a stream."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "calls": [], "reason": None}
    async for chunk in stream:
        for choice in chunk.choices:
            delta = choice.delta.model_dump()
            for name in ("content", "reasoning", "reasoning_content"):
                found[name] += delta.get(name) or ""
            for call in choice.delta.tool_calls or []:
                if call.index == len(found["calls"]):
                    assert call.type == "function"
                    found["calls"].append({"id": call.id, "name": call.function.name, "arguments": ""})
                found["calls"][call.index]["arguments"] += call.function.arguments
            found["reason"] = choice.finish_reason or found["reason"]
    return found


def test_calls_and_reasoning_whole_and_streamed() -> None:
    async def test() -> None:
        answer = f"{THOUGHT}Let me see.\n{CALL}\n{CALL}"
        async with speaking(answer) as running, running.openai() as client:
            whole = (await client.chat.completions.create(**ASKED)).choices[0]
            assert whole.finish_reason == "tool_calls"
            assert whole.message.content == "Let me see.\n"
            extra = whole.message.model_extra or {}
            assert extra["reasoning"] == extra["reasoning_content"] == "I need the weather."
            calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []]
            assert calls == [("weather", '{"city": "Zürich 🦊"}')] * 2
            streamed = await collected(await client.chat.completions.create(**ASKED, stream=True))
            assert streamed["content"] == whole.message.content
            assert streamed["reasoning"] == streamed["reasoning_content"] == extra["reasoning"]
            assert [(call["name"], call["arguments"]) for call in streamed["calls"]] == calls
            assert len({call["id"] for call in streamed["calls"]}) == 2
            assert streamed["reason"] == "tool_calls"

    run(test)


def test_the_clients_streaming_helper() -> None:
    async def test() -> None:
        async with speaking(f"{THOUGHT}I look.\n{CALL}") as running, running.openai() as client:  # strict tools
            tools = [openai.pydantic_function_tool(Weather, name="weather")]
            async with client.chat.completions.stream(model="fake", messages=MESSAGES, tools=tools) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_completion()
            assert "tool_calls.function.arguments.delta" in kinds
            assert "tool_calls.function.arguments.done" in kinds
            (call,) = final.choices[0].message.tool_calls or []
            assert call.function.parsed_arguments == Weather(city="Zürich 🦊")

    run(test)


def test_an_agent_calls_a_tool_and_gets_its_answer() -> None:
    async def test() -> None:
        async with speaking(THOUGHT + CALL, "It is sunny.") as running, running.openai() as client:
            messages, seen = list(MESSAGES), []
            while True:
                completion = await client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    seen.append((call.function.name, json.loads(call.function.arguments)))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
            assert seen == [("weather", {"city": "Zürich 🦊"})]
            assert message.content == "It is sunny."
            shown = await running.http().post("/tokenize", json={"messages": messages})
            text = await running.frontend.detokenize(shown.json()["tokens"])
            assert "[assistant]<think>I need the weather.</think><tool_call>{" in text
            assert '"arguments": {"city": "Zürich 🦊"}' in text
            assert "[tool]sunny" in text

    run(test)


def test_no_tools_no_calls() -> None:
    async def test() -> None:
        async with speaking(CALL) as running, running.openai() as client:
            for terms in ({}, {"tools": TOOLS, "tool_choice": "none"}):
                answer = await client.chat.completions.create(model="fake", messages=MESSAGES, **terms)
                assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALL, "stop")
                assert answer.choices[0].message.tool_calls is None

    run(test)


def test_reasoning_can_be_left_out_and_has_the_name_that_is_set() -> None:
    async def test() -> None:
        async with speaking(f"{THOUGHT}Yes.", reasoning_fields=("reasoning",)) as running, running.openai() as client:
            for include, found in ((True, {"reasoning": "I need the weather."}), (False, {})):
                terms = {"model": "fake", "messages": MESSAGES, "extra_body": {"include_reasoning": include}}
                message = (await client.chat.completions.create(**terms)).choices[0].message
                assert message.content == "Yes."
                assert {name: value for name, value in (message.model_extra or {}).items() if "reason" in name} == found
                streamed = await collected(await client.chat.completions.create(**terms, stream=True))
                assert (streamed["content"], streamed["reasoning"]) == ("Yes.", found.get("reasoning", ""))
                assert streamed["reasoning_content"] == ""

    run(test)


def test_a_thought_that_is_left_out_leaves_an_empty_text() -> None:
    async def test() -> None:
        async with speaking("<think>Hm.</think>") as running, running.openai() as client:
            for include, content in ((True, None), (False, "")):
                terms = {"model": "fake", "messages": MESSAGES, "extra_body": {"include_reasoning": include}}
                assert (await client.chat.completions.create(**terms)).choices[0].message.content == content

    run(test)


def test_a_prompt_may_begin_the_thought() -> None:
    async def test() -> None:
        template = "{{ messages }}</think>{% if add_generation_prompt %}<think>\n{% endif %}"
        async with speaking("Hm.</think>Yes.", template=template) as running, running.openai() as client:
            message = (await client.chat.completions.create(model="fake", messages=MESSAGES)).choices[0].message
            assert (message.content, (message.model_extra or {})["reasoning"]) == ("Yes.", "Hm.")

    run(test)


def test_a_thought_comes_back_under_either_name() -> None:
    async def test() -> None:
        async with speaking("Yes.") as running, running.http() as client:
            for name in ("reasoning", "reasoning_content"):
                messages = [*MESSAGES, {"role": "assistant", "content": "x", name: "Hm."}]
                tokens = (await client.post("/tokenize", json={"messages": messages})).json()["tokens"]
                assert "<think>Hm.</think>x" in await running.frontend.detokenize(tokens)

    run(test)


def test_special_tokens_that_are_no_markers_stay_hidden() -> None:
    async def test() -> None:
        async with speaking("<think>a<|secret|>b</think>c<|secret|>d") as running, running.openai() as client:
            message = (await client.chat.completions.create(model="fake", messages=MESSAGES)).choices[0].message
            assert (message.content, (message.model_extra or {})["reasoning"]) == ("cd", "ab")
        async with speaking("<think>a</think>b", parsers=Parsers()) as running, running.openai() as client:
            message = (await client.chat.completions.create(model="fake", messages=MESSAGES)).choices[0].message
            assert message.content == "ab"

    run(test)


def test_harmony() -> None:
    async def test() -> None:
        answer = (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
            '<|constrain|>json<|message|>{"city": "Ur"}'
        )
        async with speaking(answer, parsers=Parsers("openai", "openai_gptoss")) as running, running.openai() as client:
            choice = (await client.chat.completions.create(**ASKED)).choices[0]
            (call,) = choice.message.tool_calls or []
            assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Ur"}')
            assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
            assert (choice.message.model_extra or {})["reasoning"] == "Hm."

    run(test)


def test_a_response_template() -> None:
    async def test() -> None:
        end = {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"}
        call = {"open_pattern": r"<\|channel\|>to=(?P<name>\w+)<\|message\|>", "close": "<|end|>", "content": "json"}
        shape = {"function": {"name": "{name}", "arguments": "{content}"}}
        fields = {"thinking": end, "tool_calls": {**call, "repeats": True, "transform": shape}, "content": {}}
        carried = read_template({"start_anchor": "[assistant]", "fields": fields}, SPECIAL)
        parsers = chosen("response_template", "auto", "", carried)
        answer = '<|channel|>analysis<|message|>Hm. <|end|> Yes. <|channel|>to=weather<|message|>{"city":"Ur"}<|end|>'
        async with speaking(answer, parsers=parsers) as running, running.openai() as client:
            choice = (await client.chat.completions.create(**ASKED)).choices[0]
            (made,) = choice.message.tool_calls or []
            assert (made.function.name, made.function.arguments) == ("weather", '{"city": "Ur"}')
            assert (choice.message.content, choice.finish_reason) == ("Yes.", "tool_calls")
            assert (choice.message.model_extra or {})["reasoning"] == "Hm."
            streamed = await collected(await client.chat.completions.create(**ASKED, stream=True))
            assert (streamed["content"], streamed["reasoning"]) == ("Yes.", "Hm.")
            assert [each["arguments"] for each in streamed["calls"]] == ['{"city": "Ur"}']
            plain = (await client.chat.completions.create(model="fake", messages=MESSAGES)).choices[0].message
            assert (plain.model_extra or {})["reasoning"] == "Hm."

    run(test)


def test_one_call_where_one_is_asked_for() -> None:
    async def test() -> None:
        async with speaking(CALL + CALL) as running, running.openai() as client:
            choice = (await client.chat.completions.create(**ASKED, parallel_tool_calls=False)).choices[0]
            assert len(choice.message.tool_calls or []) == 1
            streamed = await collected(
                await client.chat.completions.create(**ASKED, parallel_tool_calls=False, stream=True)
            )
            assert len(streamed["calls"]) == 1

    run(test)


def test_an_answer_that_is_cut_says_length() -> None:
    async def test() -> None:
        async with speaking(CALL) as running, running.openai() as client:
            choice = (await client.chat.completions.create(**ASKED, max_tokens=60)).choices[0]
            assert choice.finish_reason == "length"
            (call,) = choice.message.tool_calls or []
            assert '{"city": "Zürich 🦊"}'.startswith(call.function.arguments)

    run(test)


def test_arguments_that_are_cut_off_are_none() -> None:
    async def test() -> None:
        said = "[TOOL_CALLS]weather[ARGS]"
        async with speaking(said, parsers=Parsers("mistral")) as running, running.openai() as client:
            for most, arguments in ((len(said), ""), (len(said) + 1, "{}")):
                choice = (await client.chat.completions.create(**ASKED, max_tokens=most)).choices[0]
                assert [call.function.arguments for call in choice.message.tool_calls or []] == [arguments]

    run(test)


def test_log_probabilities_and_ids_come_with_parsed_parts() -> None:
    async def test() -> None:
        async with speaking(f"{THOUGHT}Yes.{CALL}") as running, running.http() as client:
            body = {**ASKED, "logprobs": True, "return_token_ids": True, "seed": 1}
            whole = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
            text = (await client.post("/v1/chat/completions", json={**body, "stream": True})).text
            chunks = [event["choices"][0] for event in events(text) if isinstance(event, dict)]
            ids = [token for chunk in chunks for token in chunk.get("token_ids", [])]
            assert ids == whole["token_ids"]
            positions = [each for chunk in chunks for each in (chunk["logprobs"] or {"content": []})["content"]]
            assert positions == whole["logprobs"]["content"]
            assert len(positions) == len(ids)

    run(test)


def test_effort_is_the_templates() -> None:
    async def test() -> None:
        async with speaking("Yes.") as running, running.openai() as client:
            await client.chat.completions.create(model="fake", messages=MESSAGES, reasoning_effort="none")
            create = client.chat.completions.with_raw_response.create
            raw = await create(model="fake", messages=MESSAGES, reasoning_effort="high")
            assert raw.headers["x-jaxinfer-ignored"] == "reasoning_effort"
        template = "{{ messages }} {{ reasoning_effort }}"
        async with speaking("Yes.", template=template) as running, running.openai() as client:
            terms: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "extra_body": {"return_token_ids": True}}
            answer = await client.chat.completions.create(**terms, reasoning_effort="high")
            prompt = (answer.model_extra or {})["prompt_token_ids"]
            assert (await running.frontend.detokenize(prompt)).endswith(" high")

    run(test)


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "weather"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS}},
    ],
)
def test_choices_hold_the_output_to_calls(choice: Any) -> None:
    async def test() -> None:
        async with speaking(CALL, CALL.replace("city", "town")) as running, running.openai() as client:
            answer = await client.chat.completions.create(**ASKED, tool_choice=choice)
            (call,) = answer.choices[0].message.tool_calls or []
            assert json.loads(call.function.arguments) == {"city": "Zürich 🦊"}
            assert answer.choices[0].finish_reason == "tool_calls"
            if choice == "required":  # the scripted model ignores masks
                with pytest.raises(openai.APIError, match="structured_outputs"):
                    await client.chat.completions.create(**ASKED, tool_choice=choice)

    run(test)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tool_choice": "any"}, "tool_choice='any' must be none, auto, required"),
        ({"tool_choice": "required", "tools": None}, "tool_choice='required' needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice='f' is no function of tools"),
        ({"tool_choice": "required", "tools": [{"type": "custom"}]}, "tool_choice='required' needs tools"),
        ({"tool_choice": "required", "tools": [{"type": "funktion"}]}, "tools[0]={'type': 'funktion'} must be of type"),
        (
            {"tool_choice": "required", "tools": [*TOOLS, {"function": {"name": "f", "parameters": {"not": {}}}}]},
            "tools[1].function.parameters cannot be held: ",
        ),
    ],
)
def test_choices_that_cannot_be_held_are_refused_by_name(fields: dict[str, Any], said: str) -> None:
    async def test() -> None:
        async with speaking(CALL) as running, running.openai() as client:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**{**ASKED, **fields})
            assert refused.value.body["message"].startswith(said)
            assert refused.value.param == said.split("=")[0].split("[")[0]

    run(test)


def test_without_a_parser_nothing_makes_a_model_call() -> None:
    async def test() -> None:
        async with speaking(CALL, parsers=Parsers()) as running, running.openai() as client:
            with pytest.raises(
                openai.BadRequestError, match="no parser of this model's tool calls is known"
            ) as refused:
                await client.chat.completions.create(**ASKED, tool_choice="required")
            assert refused.value.param == "tool_choice"

    run(test)


def test_many_outputs_are_parsed_each_by_itself() -> None:
    async def test() -> None:
        async with speaking(THOUGHT + CALL) as running, running.openai() as client:
            answer, more = await asyncio.gather(
                client.chat.completions.create(**ASKED, n=3), client.chat.completions.create(**ASKED, n=2)
            )
            for choice in (*answer.choices, *more.choices):
                assert choice.finish_reason == "tool_calls"
                assert len(choice.message.tool_calls or []) == 1

    run(test)


def test_models_without_a_parser_answer_in_text() -> None:
    async def test() -> None:
        async with serving() as running, running.openai() as client:
            choice = (await client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=9)).choices[0]
            assert choice.message.content
            assert "reasoning" not in (choice.message.model_extra or {})

    run(test)
