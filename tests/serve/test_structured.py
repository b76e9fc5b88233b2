"""Structured outputs through a server's doors, with the real engine on the demo model."""

import json
import re

import httpx
import jsonschema
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
