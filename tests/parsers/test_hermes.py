"""Tests of stray tags around calls: none is content, and neither is the whitespace between a call and a stray tag."""

import pytest

from jaxinfer.parsers.registry import Parsers
from tests.parsers.test_perturbed import read

TOOLS = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
TAGGED = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
MISTRAL = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'
LLAMA = '{"name": "f", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("name", "answer", "content"),
    [
        ("hermes", f"{TAGGED}\n</tool_call>", ""),
        ("hermes", f"{TAGGED}\n\n</tool_call>\n\n</tool_call> ", ""),
        ("hermes", f"{TAGGED}\n</tool_call>Done.", "Done."),
        ("hermes", f"</tool_call>\n{TAGGED}", ""),
        ("hermes", f"So:\n{TAGGED}", "So:\n"),
        ("mistral", f"{MISTRAL}\n[CALL_ID]Done.", "Done."),
        ("mistral", f"{MISTRAL}\n[ARGS]\n[CALL_ID]", ""),
        ("llama3_json", f"{LLAMA}\n<|python_tag|>", ""),
        ("llama3_json", f"{LLAMA}\n<|python_tag|>Done.", "Done."),
    ],
)
def test_stray_tags_are_dropped(name: str, answer: str, content: str) -> None:
    for parts in ([answer], list(answer)):
        message = read(Parsers(name), parts, TOOLS)
        assert [(call.name, call.arguments) for call in message.calls] == [("f", '{"a": 1}')]
        assert message.content == content
