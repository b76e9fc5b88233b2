"""Tests of fields without effect in three APIs: accepted and listed in a header; misspelt fields are rejected."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from jaxinfer.serve.api.ignored import HEADER, collecting, header_of, ignore
from tests.serve.http.scripted import QWEN, speaking
from tests.serve.http.support import Running, run

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
HI = {"role": "user", "content": "Hi"}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HI], "max_tokens": 3},
    RESPONSES: {"input": [HI], "max_output_tokens": 3},
    MESSAGES: {"messages": [HI], "max_tokens": 3},
}
TOOL: dict[str, dict[str, Any]] = {
    CHAT: {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    RESPONSES: {"type": "function", "name": "weather", "parameters": SCHEMA},
    MESSAGES: {"name": "weather", "input_schema": SCHEMA},
}
REASONING = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "gAAA"}
REDACTED = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}

# Additional fields, and the expected header.
ACCEPTED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, ""),
    (CHAT, {"store": False, "service_tier": "auto", "verbosity": "medium", "user": None}, ""),
    (CHAT, {"store": True, "metadata": {"a": "b"}, "user": "me"}, "store, metadata, user"),
    (CHAT, {"verbosity": "low", "prediction": {"type": "content", "content": "x"}}, "verbosity, prediction"),
    (CHAT, {"prompt_cache_key": "k", "prompt_cache_retention": "24h"}, "prompt_cache_key, prompt_cache_retention"),
    (CHAT, {"service_tier": "flex", "web_search_options": {}}, "service_tier, web_search_options"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"tools": [TOOL[CHAT], {"type": "custom", "custom": {"name": "patch"}}]}, "tools[1].type=custom"),
    (CHAT, {"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    (CHAT, {"structured_outputs": {"regex": "Y.*"}, "guided_decoding_backend": "x"}, "guided_decoding_backend"),
    (RESPONSES, {"store": True, "client_metadata": {"x": "y"}}, "store, client_metadata"),
    (RESPONSES, {"context_management": [{"type": "compaction"}]}, "context_management"),
    (RESPONSES, {"truncation": "auto", "max_tool_calls": 3}, "truncation, max_tool_calls"),
    (RESPONSES, {"text": {"verbosity": "high"}}, "text.verbosity"),
    (RESPONSES, {"reasoning": {"effort": "medium", "summary": "detailed"}}, "reasoning.summary, reasoning.effort"),
    (RESPONSES, {"include": ["reasoning.encrypted_content"]}, "include=reasoning.encrypted_content"),
    (
        RESPONSES,
        {"tools": [{"type": kind} for kind in ("web_search", "web_search_2025_08_26", "local_shell")]},
        "tools[0].type=web_search, tools[1].type=web_search_2025_08_26, tools[2].type=local_shell",
    ),
    (RESPONSES, {"tools": [TOOL[RESPONSES], {"type": "custom", "name": "apply_patch"}]}, "tools[1].type=custom"),
    (RESPONSES, {"tools": [{**TOOL[RESPONSES], "defer_loading": True}]}, "tools[0].defer_loading"),
    (RESPONSES, {"input": [HI, REASONING, HI]}, "input[1].encrypted_content"),
    (RESPONSES, {"input": [HI, {"type": "web_search_call", "id": "ws"}, HI]}, "input[1].type=web_search_call"),
    (MESSAGES, {"context_management": {"edits": []}, "speed": "fast"}, "context_management, speed"),
    (
        MESSAGES,
        {"output_config": {"effort": "high", "task_budget": {}}},
        "output_config.task_budget, output_config.effort",
    ),
    (
        MESSAGES,
        {"metadata": {"user_id": "me"}, "cache_control": {"type": "ephemeral"}},
        "metadata.user_id, cache_control",
    ),
    (MESSAGES, {"tools": [TOOL[MESSAGES], SEARCH]}, "tools[1].type=web_search_20250305"),
    (MESSAGES, {"tools": [{**TOOL[MESSAGES], "input_examples": [{}]}]}, "tools[0].input_examples"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2000}}, ""),
    (MESSAGES, {"messages": [HI, REDACTED, HI]}, "messages[1].content[0].type=redacted_thinking"),
    (MESSAGES + "/count_tokens", {"messages": [HI], "context_management": {}}, "context_management"),
]


async def answer(running: Running, path: str, **fields: Any) -> httpx.Response:
    async with running.http() as client:
        return await client.post(path, json={"model": "fake", **BASE.get(path, {}), **fields})


@pytest.mark.parametrize("stream", [False, True])
def test_what_has_no_effect_is_named(stream: bool) -> None:
    async def test() -> None:
        async with speaking("Yes.") as running:
            for path, fields, header in ACCEPTED:
                more = {} if path.endswith("count_tokens") else {"stream": stream}
                found = await answer(running, path, **fields, **more)
                assert found.status_code == 200, (path, fields, found.text)
                assert found.headers.get(HEADER, "") == header, (path, fields)

    run(test)


SILENT = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "thinking", "header"),
    [
        (SILENT, {"type": "enabled", "budget_tokens": 2000}, "thinking.budget_tokens, thinking.type"),
        (SILENT, {"type": "adaptive", "budget_tokens": 2000}, "thinking.budget_tokens"),
        (SILENT, {"type": "disabled"}, ""),
        (f"{SILENT}</think>", {"type": "disabled"}, "thinking.type"),
        (QWEN, {"type": "disabled"}, ""),
    ],
)
def test_thinking_that_a_template_cannot_be_told(template: str, thinking: Any, header: str) -> None:
    async def test() -> None:
        async with speaking("Yes.", template=template) as running:
            found = await answer(running, MESSAGES, thinking=thinking)
            assert (found.status_code, found.headers.get(HEADER, "")) == (200, header), found.text

    run(test)


# Misspelt fields, fields of other servers, and the end of the expected error.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"temprature": 1}, "temprature is not a field of this request: did you mean temperature?"),
    (
        CHAT,
        {"stream_options": {"include_usgae": True}},
        "did you mean include_usage?",
    ),
    (CHAT, {"max_output_tokens": 3}, "did you mean max_tokens?"),
    (CHAT, {"guided_jsn": {}}, "did you mean guided_json?"),
    (CHAT, {"regex": "a"}, "did you mean structured_outputs.regex?"),
    (CHAT, {"ebnf": "a"}, "did you mean structured_outputs.grammar?"),
    (CHAT, {"reasoning": {"effort": "low"}}, "did you mean reasoning_effort?"),
    (CHAT, {"colour": "red"}, "colour is not a field of this request"),
    (RESPONSES, {"client_metdata": {}}, "did you mean client_metadata?"),
    (RESPONSES, {"text": {"verbosty": "low"}}, "text.verbosty is not a field of this request: did you mean verbosity?"),
    (RESPONSES, {"response_format": {}}, "did you mean text.format?"),
    (RESPONSES, {"max_tokens": 3}, "did you mean max_output_tokens?"),
    (RESPONSES, {"tools": [{"type": "locl_shell"}]}, "did you mean local_shell?"),
    (
        MESSAGES,
        {"output_config": {"efort": "high"}},
        "output_config.efort is not a field",
    ),
    (MESSAGES, {"contxt_management": {}}, "did you mean context_management?"),
    (MESSAGES, {"stop": ["x"]}, "did you mean stop_sequences?"),
    (
        MESSAGES,
        {"thinking": {"type": "enabled", "budget_token": 5}},
        "did you mean budget_tokens?",
    ),
    (MESSAGES, {"tools": [{"type": "web_serch_20250305", "name": "x"}]}, "did you mean web_search?"),
    (MESSAGES, {"metadata": {"user_i": "x"}}, "did you mean user_id?"),
]


def test_misspelt_fields_are_refused_with_the_nearest_name() -> None:
    async def test() -> None:
        async with speaking("Yes.") as running:
            for path, fields, words in REFUSED:
                found = await answer(running, path, **fields)
                message = found.json()["error"]["message"]
                assert (found.status_code, words in message) == (400, True), (path, fields, message)
                assert HEADER not in found.headers

    run(test)


def test_what_is_ignored_is_refused_where_nothing_can_say_so() -> None:
    assert not ignore("store")
    with collecting() as names:
        assert ignore("store")
    assert names == ["store"]


def test_the_header_is_bounded_and_names_each_field_once() -> None:
    assert header_of(["a", "b", "a"]) == "a, b"
    long = header_of([f"input[{rank}].encrypted_content" for rank in range(1000)])
    assert len(long) <= 1010
    assert long.endswith("encrypted_content, ...")


GUIDED: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}, '{"a":1}'),
    ({"guided_regex": "ab+"}, "abb"),
    ({"guided_choice": ["xy", "xz"]}, "xz"),
    ({"guided_grammar": 'root ::= "ok" [0-9]'}, "ok7"),
]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_the_older_names_of_constraints_hold_the_output(path: str) -> None:
    """Legacy names of constraints work; the scripted engine fails if an answer violates its constraint."""

    async def test() -> None:
        base: dict[str, Any] = {**BASE.get(path, {"prompt": "Hi"}), "max_tokens": 50}
        said = [each for _, answer in GUIDED for each in (answer, "Zz")]
        async with speaking(*said) as running, running.http() as client:
            for fields, answer in GUIDED:
                (choice,) = (await client.post(path, json={**base, **fields})).json()["choices"]
                assert (choice["message"]["content"] if path == CHAT else choice["text"]) == answer
                assert (await client.post(path, json={**base, **fields})).status_code == 400

    run(test)


@pytest.mark.parametrize(
    "more",
    [{"guided_choice": ["a"]}, {"structured_outputs": {"regex": "a"}}, {"response_format": {"type": "json_object"}}],
)
def test_constraints_exclude_each_other(more: dict[str, Any]) -> None:
    async def test() -> None:
        async with speaking("Yes.") as running:
            refused = await answer(running, CHAT, guided_regex="a", **more)
            assert (refused.status_code, "exclude each other" in refused.text) == (400, True)

    run(test)
