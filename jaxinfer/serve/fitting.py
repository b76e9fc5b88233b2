"""Fit conversations to chat templates, which differ in what they know and in how they want it. No jax."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.calls import Conversation
from jaxinfer.serve.ignored import ignore
from jaxinfer.text.chat_template import TemplateError
from jaxinfer.text.contents import asks_for_none

_ADDS_ARGUMENTS = re.compile(r"\+\s*[\w.\[\]'\"]*arguments['\"\]]*\s*\+")


def fitted(conversation: Conversation, sources: Sequence[str]) -> Conversation:
    """Fit a conversation to templates that know neither tools nor efforts nor the role ``developer``, which is OpenAI's
    newer name of ``system``, and calls in its messages to how templates want them.

    Args:
        sources: of the templates, of which one is used.

    Raises:
        RequestError: there are tools, and no template would show them to the model; or there is an effort that none
            knows, and nothing tells the client that it is ignored.
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
    """The prompt that a template makes of messages. Templates may refuse system messages behind the first, or leave
    them out: then all of them are one, in front.

    Args:
        write: renders messages by the template.

    Raises:
        TemplateError: the template takes the messages in neither form.
    """
    if not any(map(_instructs, messages[1:])) or _shows_all(messages, write):
        return write(messages)
    instructions = list(filter(_instructs, messages))
    contents = (str(each.get("content") or "").strip() for each in instructions)
    one = {**instructions[0], "content": "\n\n".join(filter(None, contents))}
    try:
        return write([one, *(each for each in messages if not _instructs(each))])
    except TemplateError:
        return write(messages)


def _instructs(message: Mapping[str, Any]) -> bool:
    return message.get("role") in ("system", "developer")


def _shows_all(messages: Sequence[Mapping[str, Any]], write: Callable[[Sequence[Mapping[str, Any]]], str]) -> bool:
    """Whether a template shows the model each system message where it stands."""
    places = [rank for rank, each in enumerate(messages) if _instructs(each)]
    marks = {rank: {"content": f"instruction7c1d83f0{rank}x"} for rank in places}
    try:
        text = write([{**each, **marks.get(rank, {})} for rank, each in enumerate(messages)])
    except TemplateError:
        return False
    return all(mark["content"] in text for mark in marks.values())


def _effort(effort: str, sources: Sequence[str]) -> dict[str, Any]:
    """The variables for an effort. Some templates know no more than whether to think at all."""
    if _has_word(sources, "reasoning_effort"):
        return {"reasoning_effort": effort}
    switches = thinking_switches(sources)
    if effort == "none" and switches:
        return dict.fromkeys(switches, False)
    if not ignore("reasoning_effort"):
        raise RequestError("reasoning_effort", f"={effort!r}: the model's chat template knows no such effort")
    return {}


def thinking_switches(sources: Sequence[str]) -> list[str]:
    """Variables by which templates are told whether the model is to think."""
    return [word for word in ("enable_thinking", "thinking") if _has_word(sources, word)]


@dataclasses.dataclass(frozen=True)
class _Wishes:
    """How templates want messages with calls.

    Attributes:
        none: content that is none stays none. Else it is an empty text: GLM's template would write "None", gpt-oss's
            would fail.
        thinking: the thought has gpt-oss's name for it, too, which refuses one beside content.
        text: arguments are a text, to which DeepSeek's add others.
    """

    none: bool
    thinking: bool
    text: bool

    @classmethod
    def of(cls, sources: Sequence[str]) -> _Wishes:
        text = any(map(_ADDS_ARGUMENTS.search, sources))
        return cls(asks_for_none(sources), _has_word(sources, "message.thinking"), text)

    def met(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message as they want it."""
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
