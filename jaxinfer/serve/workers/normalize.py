"""Adapt conversations to chat templates, which differ in supported features and message format. No jax."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.ignored import ignore
from jaxinfer.serve.api.requests import Conversation
from jaxinfer.text.chat_template import TemplateError
from jaxinfer.text.contents import asks_for_none

_ADDS_ARGUMENTS = re.compile(r"\+\s*[\w.\[\]'\"]*arguments['\"\]]*\s*\+")


def normalize_messages(conversation: Conversation, sources: Sequence[str]) -> Conversation:
    """Adapt a conversation to templates without tools, reasoning effort or the role ``developer`` (OpenAI's newer name
    of ``system``), and the tool calls in its messages to the format that the templates expect.

    Args:
        sources: sources of the templates, one of which is used.

    Raises:
        RequestError: no template would show the tools to the model, or no template supports the reasoning effort and
            the client cannot be informed that it is ignored.
    """
    if conversation.tools and not _has_word(sources, "tools"):
        raise RequestError("tools", ": the model's chat template has no place for tools: leave them out")
    variables = dict(conversation.variables)
    if conversation.reasoning_effort is not None:
        variables = {**_effort(conversation.reasoning_effort, sources), **variables}
    messages = conversation.messages
    if not _has_word(sources, "developer"):
        messages = [{**each, "role": "system"} if each.get("role") == "developer" else each for each in messages]
    if any(each.get("tool_calls") for each in messages):
        wishes = _Wishes.of(sources)
        messages = [wishes.met(each) if each.get("tool_calls") else each for each in messages]
    return dataclasses.replace(conversation, messages=messages, variables=variables)


def written(messages: Sequence[Mapping[str, Any]], write: Callable[[Sequence[Mapping[str, Any]]], str]) -> str:
    """Render messages with a template. A template may reject or drop system messages after the first; then all of them
    are merged into one at the front.

    Args:
        write: renders messages with the template.

    Raises:
        TemplateError: the template rejects the messages in both forms.
    """
    if not any(map(_instructs, messages[1:])) or _shows_all(messages, write):
        return write(messages)
    instructions = list(filter(_instructs, messages))
    if any(isinstance(each.get("content"), list) for each in instructions):  # they have images
        return write(messages)
    contents = (str(each.get("content") or "").strip() for each in instructions)
    one = {**instructions[0], "content": "\n\n".join(filter(None, contents))}
    try:
        return write([one, *(each for each in messages if not _instructs(each))])
    except TemplateError:
        return write(messages)


def _instructs(message: Mapping[str, Any]) -> bool:
    return message.get("role") in ("system", "developer")


def _shows_all(messages: Sequence[Mapping[str, Any]], write: Callable[[Sequence[Mapping[str, Any]]], str]) -> bool:
    """Whether the text rendered by a template contains every system message."""
    places = [rank for rank, each in enumerate(messages) if _instructs(each)]
    marks = {rank: {"content": f"instruction7c1d83f0{rank}x"} for rank in places}
    try:
        text = write([{**each, **marks.get(rank, {})} for rank, each in enumerate(messages)])
    except TemplateError:
        return False
    return all(mark["content"] in text for mark in marks.values())


def _effort(effort: str, sources: Sequence[str]) -> dict[str, Any]:
    """Return the template variables of a reasoning effort. Some templates can only turn thinking on or off."""
    if _has_word(sources, "reasoning_effort"):
        return {"reasoning_effort": effort}
    switches = thinking_switches(sources)
    if effort == "none" and switches:
        return dict.fromkeys(switches, False)
    if not ignore("reasoning_effort"):
        raise RequestError("reasoning_effort", f"={effort!r}: the model's chat template knows no such effort")
    return {}


def thinking_switches(sources: Sequence[str]) -> list[str]:
    """Return the names of the template variables that turn thinking on or off."""
    return [word for word in ("enable_thinking", "thinking") if _has_word(sources, word)]


@dataclasses.dataclass(frozen=True)
class _Wishes:
    """The format that templates expect for messages with tool calls.

    Attributes:
        none: whether null content stays None. Otherwise it becomes an empty string: GLM's template would write "None",
            gpt-oss's would fail.
        thinking: whether reasoning is also passed under gpt-oss's name, which rejects it together with content.
        text: whether arguments are a JSON string, which DeepSeek's template concatenates with other strings.
    """

    none: bool
    thinking: bool
    text: bool

    @classmethod
    def of(cls, sources: Sequence[str]) -> _Wishes:
        text = any(map(_ADDS_ARGUMENTS.search, sources))
        return cls(asks_for_none(sources), _has_word(sources, "message.thinking"), text)

    def met(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message in the format that the templates expect."""
        made = dict(message)
        if made.get("content") is None:
            made["content"] = None if self.none else ""
        thought = made.get("reasoning_content")
        if self.thinking and thought and not made["content"]:
            made.setdefault("thinking", thought)
        if self.text and isinstance(made["tool_calls"], list):
            made["tool_calls"] = [_in_text(call) for call in made["tool_calls"]]
        return made


def _in_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or isinstance(function.get("arguments", ""), str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _has_word(sources: Sequence[str], word: str) -> bool:
    return any(word in source for source in sources)
