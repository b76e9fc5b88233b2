"""Tests of structured outputs in the APIs of a server, with the real engine on the demo model."""

import json
import re
from typing import Literal

import anthropic
import httpx
import jsonschema
import openai
import pydantic
import pytest

from jaxinfer import client as c
from jaxinfer.config import EngineConfig
from jaxinfer.serve.settings import ServeConfig
from tests.serve.live import Live, live

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPT = "ROMEO:\n"


@pytest.fixture(scope="module")
def server():
    engine = EngineConfig(max_num_seqs=4, max_model_len=256, prefill_sizes=(64,))
    with live(ServeConfig(model="demo", grpc_port=0, http_port=0, engine=engine)) as found:
        yield found


def post(server: Live, path: str, **fields: object) -> httpx.Response:
    body = {"seed": 1, "temperature": 1.0, "max_tokens": 100, **fields}
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=240)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["text"]


def test_completions(server):
    schema = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
    jsonschema.validate(json.loads(text_of(post(server, "completions", prompt=PROMPT, response_format=schema))), SCHEMA)
    asked = {"json": SCHEMA}
    jsonschema.validate(
        json.loads(text_of(post(server, "completions", prompt=PROMPT, structured_outputs=asked))), SCHEMA
    )
    regex = text_of(post(server, "completions", prompt=PROMPT, structured_outputs={"regex": "[A-Z]{2,5}!"}))
    assert re.fullmatch("[A-Z]{2,5}!", regex)
    plain = post(server, "completions", prompt=PROMPT, response_format={"type": "text"}).json()
    assert plain == {
        **post(server, "completions", prompt=PROMPT).json(),
        "id": plain["id"],
        "created": plain["created"],
    }


class Person(pydantic.BaseModel):
    """Pydantic model with the schema `SCHEMA`."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=8)
    age: int = pydantic.Field(ge=0, le=99)


def test_responses_are_parsed_by_their_client(server):
    asked = {"model": "demo", "input": "Who is Romeo?", "text_format": Person, "extra_body": {"seed": 1}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        response = client.responses.parse(**asked)
        assert isinstance(response.output_parsed, Person)
        assert response.status == "completed"
        with client.responses.stream(**asked) as stream:
            assert stream.until_done().get_final_response().output_parsed == response.output_parsed
        with pytest.raises(openai.BadRequestError, match=r"text\.format.* cannot be held.*not") as refused:
            client.responses.create(
                model="demo",
                input="Hi",
                text={"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}},
            )
        assert refused.value.param == "text.format"


class Verdict(pydantic.BaseModel):
    """Pydantic model without bounds, because the client would not send them."""

    who: Literal["Romeo", "Juliet"]
    lives: bool


def test_messages_are_parsed_by_their_client(server):
    asked = {"model": "demo", "max_tokens": 100, "messages": [{"role": "user", "content": "Who is Romeo?"}]}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        message = client.messages.parse(**asked, output_format=Verdict, extra_body={"seed": 1})
        assert isinstance(message.parsed_output, Verdict)
        assert message.stop_reason == "end_turn"
        schema = {"type": "json_schema", "schema": {"not": {}}}
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format.* cannot be held.*not"):
            client.messages.create(**asked, output_config={"format": schema})


def test_the_client(server):
    with c.Client(server.target) as client:
        found = client.generate(PROMPT, structured_outputs={"choice": ["yes", "no"]}, seed=1)
        assert found.outputs[0].text in ("yes", "no")
        tag = {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{1,3}"}, "end": "</n>"}
        asked = {"structural_tag": {"type": "structural_tag", "format": tag}}
        found = client.generate(PROMPT, structured_outputs=asked, seed=1, max_tokens=20)
        assert re.fullmatch("<n>[0-9]{1,3}</n>", found.outputs[0].text)
        with pytest.raises(
            c.InvalidRequest, match=r"structured_outputs\.structural_tag cannot be held: format\.type='x'"
        ):
            client.generate(
                PROMPT, structured_outputs={"structural_tag": '{"type": "structural_tag", "format": {"type": "x"}}'}
            )
        with pytest.raises(c.InvalidRequest, match=r"structured_outputs\.json cannot be held.*not"):
            client.generate(PROMPT, structured_outputs={"json": {"not": {}}})


def test_nothing_is_compiled_for_it(server):
    text_of(post(server, "completions", prompt=PROMPT, structured_outputs={"grammar": 'root ::= "a" [b-c]+ "."'}))
    figures = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert re.search(r"^jaxinfer:compilations_total\S* 0\.0$", figures, re.MULTILINE), figures
