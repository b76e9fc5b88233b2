"""Chat request fields about tools and reasoning, validated once for all APIs. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from jaxinfer.parsers.registry import Parsers
from jaxinfer.serve.api.errors import invalid, map_exceptions
from jaxinfer.serve.frontend.chat.tool_choice import Choice, choice_of, held

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: Sequence[str] = get_args(Effort)
NONE, AUTO, REQUIRED = "none", "auto", "required"


@dataclasses.dataclass(frozen=True)
class ChatTerms:
    """Fields of a chat request by OpenAI's names and in OpenAI's formats. None: not set.

    Attributes:
        tool_choice: "none", "auto", "required", or an object that names functions.
        begun: text of the last message, which the output continues.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    begun: str | None = None

    @property
    def shown_tools(self) -> Sequence[Mapping[str, Any]] | None:
        """Tools that are passed to the chat template."""
        return None if self.tool_choice == NONE else self.tools

    @property
    def choice(self) -> Choice:
        """The parsed ``tool_choice``. Raises `ServeError` INVALID if it is invalid."""
        with map_exceptions():
            return choice_of(self.tool_choice)

    def parsers(self, known: Parsers) -> Parsers:
        """Return the parsers of the output: calls are parsed only if there are tools.

        Raises:
            ServeError: INVALID, naming field and value: the model has no parser that the field needs.
        """
        if self.choice.mode == NONE or not self.tools:
            return dataclasses.replace(known, tool_calls=None)
        if self.parallel_tool_calls is False and known.tool_calls is None:
            reason = "is not served: no parser of this model's tool calls is known"
            raise invalid("parallel_tool_calls", False, reason)
        return known

    def held(self, sampling: Mapping[str, Any], parsers: Parsers) -> dict[str, Any]:
        """Return the sampling fields with the constraint from the tools, see `tool_choice.held`.

        Args:
            parsers: parsers of the output.

        Raises:
            ServeError: INVALID, naming field and value.
        """
        with map_exceptions():
            return held(sampling, self.tools, self.tool_choice, self.parallel_tool_calls is not False, parsers)
