"""Tests of the settings in chat requests that control the answers."""

from typing import Any

import pytest

from jaxinfer.parsers.registry import Parsers
from jaxinfer.serve.api.errors import ServeError
from jaxinfer.serve.frontend.chat.terms import ChatTerms

KNOWN = Parsers("hermes", "qwen3")
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("terms", "calls"),
    [
        (ChatTerms(), None),
        (ChatTerms([]), None),
        (ChatTerms(TOOLS), "hermes"),
        (ChatTerms(TOOLS, "auto", parallel_tool_calls=False), "hermes"),
        (ChatTerms(TOOLS, "none"), None),
    ],
)
def test_calls_are_looked_for_where_there_are_tools(terms: ChatTerms, calls: str | None) -> None:
    assert terms.parsers(KNOWN) == Parsers(calls, "qwen3")


def test_tools_are_hidden_where_none_may_be_called() -> None:
    assert ChatTerms(TOOLS, "none").shown_tools is None
    assert ChatTerms(TOOLS, "auto").shown_tools == ChatTerms(TOOLS).shown_tools == TOOLS


@pytest.mark.parametrize("choice", ["any", 1, {}, {"type": "tool", "name": "f"}])
def test_a_choice_that_is_none_is_refused_with_its_value(choice: Any) -> None:
    with pytest.raises(ServeError, match=r"tool_choice=.* must be none, auto, required") as refused:
        ChatTerms(TOOLS, choice).parsers(KNOWN)
    assert refused.value.field == "tool_choice"


def test_what_must_be_called_is_a_constraint() -> None:
    held = ChatTerms(TOOLS, "required").held({"n": 2}, KNOWN)
    assert held["n"] == 2
    assert held["structured_outputs"]["structural_tag"]
    assert ChatTerms(TOOLS, "auto").held({"n": 2}, KNOWN) == {"n": 2}
    with pytest.raises(ServeError, match="tool_choice='required' needs tools"):
        ChatTerms(None, "required").held({}, KNOWN)


def test_one_call_alone_needs_a_parser() -> None:
    with pytest.raises(ServeError, match="no parser of this model's tool calls is known") as refused:
        ChatTerms(TOOLS, parallel_tool_calls=False).parsers(Parsers())
    assert refused.value.field == "parallel_tool_calls"
