"""Test that every public name of the release of 2026-11-28 is still served."""

import json
import pathlib
import urllib.request

import pytest

from tests.interface import names, served

RECORD = pathlib.Path(__file__).with_name("goldens") / "interface_2026-11-28.txt"

# Fields that were declared and had no effect: they are no longer declared, and still accepted.
IGNORED = {
    "/v1/chat/completions": {"stream": True, "stream_options": {"include_obfuscation": True}},
    "/v1/completions": {"stream": True, "stream_options": {"include_obfuscation": True}},
    "/v1/messages": {"metadata": {"user_id": "a"}},
    "/v1/responses": {
        "stream": True,
        "stream_options": {"include_obfuscation": True},
        "reasoning": {"context": "auto", "generate_summary": "auto", "mode": "auto", "summary": "auto"},
        "text": {"verbosity": "low"},
    },
}
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
}


@pytest.fixture(scope="module")
def addresses():
    with served() as found:
        yield found


def test_no_public_name_is_lost(addresses):
    ignored = {
        f"http POST {path} request {key}.{field}"
        for path, fields in IGNORED.items()
        for key, value in fields.items()
        if isinstance(value, dict)
        for field in value
    }
    recorded = set(RECORD.read_text().splitlines())
    assert recorded - names(*addresses) - ignored == set()


@pytest.mark.parametrize("path", IGNORED)
def test_fields_without_effect_are_accepted(addresses, path):
    body = {"model": "demo", **BODIES[path], **IGNORED[path]}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{addresses[0]}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
        assert answer.headers["x-jaxinfer-ignored"]
