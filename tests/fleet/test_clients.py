"""Tests of published clients and agent frameworks against the demo model: each runs a loop with two tools, requests a
schema, and reads a stream.

The model is not trained on tools, so calls are forced (`tool_choice`): the engine's masks constrain it to tool calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator
from typing import Any, Literal

import agents
import anthropic
import instructor
import langchain_openai
import litellm
import openai
import pydantic
import pydantic_ai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool as langchain_tool
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from jaxinfer.config import EngineConfig
from jaxinfer.config.aliases import demo_folder
from jaxinfer.serve.settings import ServeConfig
from tests.serve.live import Live, live

QUESTION = "How is the weather, and what time is it?"
SECONDS, MOST = 240, 200


class Answer(pydantic.BaseModel):
    """The requested schema."""

    model_config = pydantic.ConfigDict(extra="forbid")  # else the model adds other fields

    city: Literal["Rome", "Oslo"]
    degrees: Literal[10, 20, 30]


class Done:
    """Client side of the loop, which records the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def weather(self, city: str) -> str:
        self.calls.append(("weather", city))
        return "20"

    def clock(self, city: str) -> str:
        self.calls.append(("clock", city))
        return "noon"

    def run(self, name: str, arguments: dict[str, Any]) -> str:
        assert name in ("weather", "clock")
        assert arguments["city"] in ("Rome", "Oslo")
        return self.weather(**arguments) if name == "weather" else self.clock(**arguments)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The demo model with greedy decoding by default: several clients raise an error for an answer cut at its limit."""
    folder = tmp_path_factory.mktemp("greedy") / "demo"
    shutil.copytree(demo_folder("demo") or "", folder)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    engine = EngineConfig(max_num_seqs=4, prefill_sizes=(64,))
    with live(ServeConfig(model=str(folder), grpc_port=0, http_port=0, engine=engine)) as found:
        yield found


@pytest.fixture
def url(server: Live) -> str:
    return f"{server.url}/v1"


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
NAMES = ("weather", "clock")
FUNCTIONS: Any = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES]


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def test_openai_chat(url: str) -> None:
    done, messages = Done(), [{"role": "user", "content": QUESTION}]
    asked: Any = {"model": "demo", "tools": FUNCTIONS, "max_tokens": MOST, "messages": messages}
    with openai.OpenAI(base_url=url, api_key="none", timeout=SECONDS) as client:
        for choice in (named("weather"), named("clock"), "none"):
            message = client.chat.completions.create(**asked, tool_choice=choice).choices[0].message
            messages.append(message)  # type: ignore[arg-type]
            for call in message.tool_calls or []:
                assert call.type == "function"
                found = done.run(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
        assert [name for name, _ in done.calls] == list(NAMES)
        parsed = client.chat.completions.parse(model="demo", messages=asked["messages"], response_format=Answer)
        assert isinstance(parsed.choices[0].message.parsed, Answer)
        with client.chat.completions.stream(**asked, tool_choice=named("clock")) as stream:
            kinds = {event.type for event in stream}
            assert stream.get_final_completion().choices[0].message.tool_calls
        assert "tool_calls.function.arguments.done" in kinds


def test_openai_responses(url: str) -> None:
    done, items = Done(), [{"role": "user", "content": QUESTION}]
    tools: Any = [{"type": "function", "name": name, "parameters": PARAMETERS, "strict": True} for name in NAMES]
    asked: Any = {"model": "demo", "tools": tools, "input": items, "max_output_tokens": MOST}
    with openai.OpenAI(base_url=url, api_key="none", timeout=SECONDS) as client:
        for choice in ({"type": "function", "name": "weather"}, {"type": "function", "name": "clock"}, "none"):
            response = client.responses.create(**asked, tool_choice=choice)
            items += response.output  # type: ignore[arg-type]
            for call in response.output:
                if call.type == "function_call":
                    found = done.run(call.name, json.loads(call.arguments))
                    items.append({"type": "function_call_output", "call_id": call.call_id, "output": found})
        assert [name for name, _ in done.calls] == list(NAMES)
        parsed = client.responses.parse(model="demo", input=QUESTION, text_format=Answer)
        assert isinstance(parsed.output_parsed, Answer)
        with client.responses.stream(**asked, tool_choice="required", parallel_tool_calls=False) as stream:
            kinds = [event.type for event in stream]
        assert kinds[-1] == "response.completed"


def test_anthropic(server: Live) -> None:
    done, messages = Done(), [{"role": "user", "content": QUESTION}]
    tools: Any = [{"name": name, "input_schema": PARAMETERS} for name in NAMES]
    asked: Any = {"model": "demo", "tools": tools, "messages": messages, "max_tokens": MOST}
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=SECONDS) as client:
        for choice in ({"type": "tool", "name": "weather"}, {"type": "tool", "name": "clock"}, {"type": "none"}):
            message = client.messages.create(**asked, tool_choice=choice)
            calls = [block for block in message.content if block.type == "tool_use"]
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": done.run(call.name, dict(call.input))}  # type: ignore[call-overload]
                for call in calls
            ]
            messages.append({"role": "assistant", "content": message.content})  # type: ignore[dict-item]
            messages.append({"role": "user", "content": results or "Well?"})  # type: ignore[dict-item]
        assert [name for name, _ in done.calls] == list(NAMES)
        first: Any = {"model": "demo", "max_tokens": MOST, "messages": messages[:1]}
        parsed = client.messages.parse(**first, output_format=Answer)
        assert isinstance(parsed.parsed_output, Answer)
        with client.messages.stream(**asked, tool_choice={"type": "tool", "name": "clock"}) as stream:
            assert stream.get_final_message().stop_reason == "tool_use"


def test_langchain(url: str) -> None:
    done = Done()

    @langchain_tool
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """How warm it is."""
        return done.weather(city)

    @langchain_tool
    def clock(city: Literal["Rome", "Oslo"]) -> str:
        """What time it is."""
        return done.clock(city)

    tools = {each.name: each for each in (weather, clock)}
    model = langchain_openai.ChatOpenAI(base_url=url, api_key="none", model="demo", max_tokens=MOST, timeout=SECONDS)  # type: ignore[arg-type]
    messages: list[Any] = [HumanMessage(QUESTION)]
    for choice in ("weather", "clock", "none"):
        answer = model.bind_tools(list(tools.values()), tool_choice=choice, strict=True).invoke(messages)
        messages.append(answer)
        messages += [tools[call["name"]].invoke(call) for call in answer.tool_calls]
    assert [name for name, _ in done.calls] == list(NAMES)
    assert isinstance(messages[-1], AIMessage)
    assert isinstance(messages[2], ToolMessage)
    for method in ("function_calling", "json_schema"):
        assert isinstance(model.with_structured_output(Answer, method=method).invoke(QUESTION), Answer)  # type: ignore[arg-type]
    chunks = list(model.stream(QUESTION))
    assert len(chunks) > 2
    assert "".join(str(chunk.content) for chunk in chunks)


def test_litellm(url: str) -> None:
    done, messages = Done(), [{"role": "user", "content": QUESTION}]
    server: Any = {"model": "openai/demo", "api_base": url, "api_key": "none", "max_tokens": MOST, "timeout": SECONDS}
    for choice in (named("weather"), named("clock"), "none"):
        answer: Any = litellm.completion(**server, messages=messages, tools=FUNCTIONS, tool_choice=choice)
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            found = done.run(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    assert [name for name, _ in done.calls] == list(NAMES)
    answer = litellm.completion(**server, messages=messages[:1], response_format=Answer)
    Answer.model_validate_json(answer.choices[0].message.content)
    chunks: Any = list(litellm.completion(**server, messages=messages[:1], stream=True))  # type: ignore[arg-type]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**server, messages=[{"role": "user", "content": "word " * 9000}])


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents(url: str, api: str) -> None:
    done = Done()

    @agents.function_tool
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """How warm it is."""
        return done.weather(city)

    @agents.function_tool
    def clock(city: Literal["Rome", "Oslo"]) -> str:
        """What time it is."""
        return done.clock(city)

    async def loops() -> list[str]:
        client = openai.AsyncOpenAI(base_url=url, api_key="none", timeout=SECONDS)
        model = (agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel)("demo", client)
        forced = agents.ModelSettings(tool_choice="required", max_tokens=MOST, parallel_tool_calls=False)
        for one in (weather, clock):  # the tool must be called; the answer to its result is free
            agent = agents.Agent("helper", instructions="ROMEO", model=model, tools=[one], model_settings=forced)
            assert isinstance((await agents.Runner.run(agent, QUESTION)).final_output, str)
        for seed in range(9):  # after the forced call, the model freely chooses between the tools and the answer
            sampled = dataclasses.replace(forced, temperature=1.5, extra_body={"seed": seed})
            both = agents.Agent(
                "helper", model=model, tools=[weather, clock], model_settings=sampled, output_type=Answer
            )
            with contextlib.suppress(agents.MaxTurnsExceeded):
                assert isinstance((await agents.Runner.run(both, QUESTION)).final_output, Answer)
                break
        else:
            pytest.fail("no seed ends with an answer")
        plain = agents.Agent("helper", model=model, model_settings=agents.ModelSettings(max_tokens=MOST))
        result = agents.Runner.run_streamed(plain, QUESTION)
        return [event.type async for event in result.stream_events()]

    agents.set_tracing_disabled(True)
    assert "raw_response_event" in asyncio.run(loops())
    assert {name for name, _ in done.calls} == set(NAMES)


@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
def test_pydantic_ai(url: str, kind: Any) -> None:
    done = Done()
    model = kind("demo", provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = pydantic_ai.Agent(model, output_type=Answer, retries=3)

    async def once(context: Any, definition: Any) -> Any:
        """Offer a tool until it was called."""
        return None if definition.name in dict(done.calls) else definition

    @agent.tool_plain(prepare=once)
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """How warm it is."""
        return done.weather(city)

    @agent.tool_plain(prepare=once)
    def clock(city: Literal["Rome", "Oslo"]) -> str:
        """What time it is."""
        return done.clock(city)

    for seed in range(9):  # the model freely chooses between the tools and the one that ends the loop
        settings = pydantic_ai.ModelSettings(
            max_tokens=MOST, parallel_tool_calls=False, timeout=SECONDS, temperature=1.5, seed=seed
        )
        assert isinstance(agent.run_sync(QUESTION, model_settings=settings).output, Answer)
        if {name for name, _ in done.calls} == set(NAMES):
            break
    assert {name for name, _ in done.calls} == set(NAMES)

    async def streamed() -> list[str]:
        plain = pydantic_ai.Agent(model, model_settings=pydantic_ai.ModelSettings(max_tokens=MOST))
        async with plain.run_stream(QUESTION) as result:
            return [text async for text in result.stream_text(delta=True)]

    assert "".join(asyncio.run(streamed()))


def test_instructor(url: str) -> None:
    done = Done()
    with openai.OpenAI(base_url=url, api_key="none", timeout=SECONDS) as plain:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            client = instructor.from_openai(plain, mode=mode)
            messages: Any = [{"role": "user", "content": QUESTION}]
            for kind in (weather_call, clock_call):  # each is a separate tool, and its result is sent back
                call = client.create(model="demo", messages=messages, max_tokens=MOST, response_model=kind)
                found = done.run(kind.__name__.removesuffix("_call"), call.model_dump())
                messages.append({"role": "assistant", "content": call.model_dump_json()})
                messages.append({"role": "user", "content": found})
            asked: Any = {"model": "demo", "messages": messages, "max_tokens": MOST}
            assert isinstance(client.create(**asked, response_model=Answer), Answer)
            assert list(client.create_partial(**asked, response_model=Answer))[-1].degrees in (10, 20, 30)
    assert [name for name, _ in done.calls] == [*NAMES, *NAMES]


class _Call(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]


class weather_call(_Call):  # noqa: N801 - the name of the tool
    """How warm it is."""


class clock_call(_Call):  # noqa: N801
    """What time it is."""
