"""Tests of tool choices on the real engine with the official client: the demo model, untrained on tools, calls them."""

import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.serve.settings import ServeConfig
from tests.serve.live import Live, live

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {"weather": CITY, "now": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
STRICT: list[Any] = [{"type": "function", "function": {**each["function"], "strict": True}} for each in TOOLS]
NAMED = {"type": "function", "function": {"name": "weather"}}
ASKED: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "How is the weather?"}],
    "tools": TOOLS,
    "temperature": 1.5,
    "max_tokens": 400,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    engine = EngineConfig(max_num_seqs=4, max_model_len=1024, prefill_sizes=(64,))
    with live(ServeConfig(model="demo", grpc_port=0, http_port=0, engine=engine)) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=240, max_retries=0) as found:
        yield found


def test_the_readme_shows_a_call(repo: pathlib.Path, client: openai.OpenAI) -> None:
    (body,) = re.findall(r"/v1/chat/completions .* -d '([^']+)'", (repo / "README.md").read_text(encoding="utf-8"))
    choice = client.chat.completions.create(model="demo", **json.loads(body)).choices[0]
    assert choice.finish_reason == "tool_calls"
    call = (choice.message.tool_calls or [])[0]
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    """Return the calls; check that they are valid."""
    calls = [(each.function.name, json.loads(each.function.arguments)) for each in choice.message.tool_calls or []]
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name])
    return calls


@pytest.mark.parametrize("seed", range(4))
def test_a_call_must_be_made(client: openai.OpenAI, seed: int) -> None:
    answer = client.chat.completions.create(**ASKED, tool_choice="required", parallel_tool_calls=False, seed=seed)
    (choice,) = answer.choices
    assert len(calls_of(choice)) == 1
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)


@pytest.mark.parametrize("seed", range(3))
def test_a_function_by_name(client: openai.OpenAI, seed: int) -> None:
    (choice,) = client.chat.completions.create(**ASKED, tool_choice=NAMED, seed=seed).choices
    assert [name for name, _ in calls_of(choice)] == ["weather"]
    assert choice.finish_reason == "tool_calls"


def test_a_stream_has_the_same(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(**ASKED, tool_choice=NAMED, seed=1).choices
    with client.chat.completions.stream(**ASKED, tool_choice=NAMED, seed=1) as stream:
        (streamed,) = stream.get_final_completion().choices
    assert calls_of(streamed) == calls_of(choice)
    assert streamed.finish_reason == "tool_calls"


def test_some_of_the_tools(client: openai.OpenAI) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    (found,) = client.chat.completions.create(**ASKED, tool_choice=choice, parallel_tool_calls=False, seed=1).choices
    assert calls_of(found) == [("now", {})]


def test_text_is_free_where_functions_are_strict(client: openai.OpenAI) -> None:
    free = client.chat.completions.create(**{**ASKED, "tools": STRICT, "temperature": 0, "max_tokens": 20}).choices[0]
    plain = client.chat.completions.create(**{**ASKED, "temperature": 0, "max_tokens": 20}).choices[0]
    assert free.message.content
    assert not free.message.tool_calls
    assert plain.message.content


def test_an_answer_of_a_schema_or_calls(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for seed in range(4):
        (choice,) = client.chat.completions.create(
            **{**ASKED, "tools": STRICT}, response_format=wanted, parallel_tool_calls=False, seed=seed
        ).choices
        if not calls_of(choice):
            jsonschema.validate(json.loads(choice.message.content), schema)


def test_a_structural_tag(client: openai.OpenAI) -> None:
    tag = {"type": "tag", "begin": "<n>", "content": {"type": "json_schema", "json_schema": CITY}, "end": "</n>"}
    free = {
        "type": "triggered_tags",
        "triggers": ["<n>"],
        "tags": [tag],
        "at_least_one": True,
        "stop_after_first": True,
    }
    text = (
        client.completions.create(
            model="demo",
            prompt="ROMEO:",
            max_tokens=100,
            extra_body={"response_format": {"type": "structural_tag", "format": free}},
        )
        .choices[0]
        .text
    )
    jsonschema.validate(json.loads(text.removeprefix("<n>").removesuffix("</n>")), CITY)


def test_what_cannot_be_held_is_refused_naming_the_tool(client: openai.OpenAI) -> None:
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
    with pytest.raises(
        openai.BadRequestError, match=r"tools\[2\]\.function\.parameters cannot be held: .*not"
    ) as refused:
        client.chat.completions.create(**{**ASKED, "tools": [*TOOLS, wrong]}, tool_choice="required")
    assert refused.value.param == "tools"
    bad = {"type": "structural_tag", "format": {"type": "sequence", "elements": [{"type": "token", "token": 1}]}}
    with pytest.raises(openai.BadRequestError, match=r"format\.elements\[0\]\.type='token' is not served"):
        client.completions.create(model="demo", prompt="a", extra_body={"response_format": bad})
