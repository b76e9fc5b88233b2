"""What chat requests say of their answers."""

from typing import Any

import pytest

from jaxinfer.parsers.registry import Parsers
from jaxinfer.serve.chat.terms import ChatTerms
from jaxinfer.serve.errors import ServeError

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


@pytest.mark.parametrize("choice", ["required", "any", 1, {}, {"type": "function", "function": {"name": "f"}}])
def test_a_choice_that_is_not_served_is_refused_with_its_value(choice: Any) -> None:
    with pytest.raises(ServeError, match=r"tool_choice=.* is not served") as refused:
        ChatTerms(TOOLS, choice).parsers(KNOWN)
    assert refused.value.field == "tool_choice"


def test_one_call_alone_needs_a_parser() -> None:
    with pytest.raises(ServeError, match="no parser of this model's tool calls is known") as refused:
        ChatTerms(TOOLS, parallel_tool_calls=False).parsers(Parsers())
    assert refused.value.field == "parallel_tool_calls"
