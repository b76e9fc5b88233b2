"""Parsers by vLLM name, and detection of the parsers for a chat template."""

from __future__ import annotations

import dataclasses
import functools
import secrets
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from jaxinfer.parsers.events import Emitter
from jaxinfer.parsers.forms import Form, Function
from jaxinfer.parsers.harmony import harmony, harmony_form
from jaxinfer.parsers.hermes import hermes, hermes_form, llama3_json, llama3_json_form, mistral, mistral_form
from jaxinfer.parsers.parser import Chain, Parser, ProgramParser
from jaxinfer.parsers.pythonic import pythonic, pythonic_form
from jaxinfer.parsers.response_template.regions import TemplateParser
from jaxinfer.parsers.response_template.template import ResponseTemplate
from jaxinfer.parsers.source import Source, Wait
from jaxinfer.parsers.tagged import (
    function_follows,
    glm45,
    glm45_form,
    pair_follows,
    qwen3_coder,
    qwen3_coder_form,
)
from jaxinfer.parsers.thought import NO_SIGNS, Sign, Thought
from jaxinfer.parsers.tokens import deepseek, deepseek_v3_form, deepseek_v31_form, kimi_k2, kimi_k2_form
from jaxinfer.parsers.tools import Tools
from jaxinfer.parsers.values import object_follows

AUTO, OFF = "auto", "off"
OPENAI, GPT_OSS = "openai", "openai_gptoss"
RESPONSE_TEMPLATE = "response_template"
"""The parser defined by the tokenizer config. It parses reasoning, too."""


@runtime_checkable
class ToolFormat(Protocol):
    """Parser coroutine of a family's tool calls: see `jaxinfer.parsers.parser.Program`."""

    def __call__(self, source: Source, emitter: Emitter, tools: Tools) -> Wait[None]: ...


TOOL_PARSERS: Mapping[str, ToolFormat] = {
    "deepseek_v3": deepseek,
    "deepseek_v31": deepseek,
    "glm45": glm45,
    "glm47": glm45,
    "hermes": hermes,
    "kimi_k2": kimi_k2,
    "llama3_json": llama3_json,
    "llama4_pythonic": pythonic,
    "mistral": mistral,
    OPENAI: harmony,
    "pythonic": pythonic,
    "qwen3_coder": qwen3_coder,
}


@runtime_checkable
class ToolForm(Protocol):
    """Constructor of the grammar for a family's calls of these functions: the counterpart of its `ToolFormat`.

    Raises:
        FormError: the form cannot express a call of one of the functions.
    """

    def __call__(self, functions: Sequence[Function], *, parallel: bool) -> Form: ...


TOOL_FORMS: Mapping[str, ToolForm] = {
    "deepseek_v3": deepseek_v3_form,
    "deepseek_v31": deepseek_v31_form,
    "glm45": glm45_form,
    "glm47": glm45_form,
    "hermes": hermes_form,
    "kimi_k2": kimi_k2_form,
    "llama3_json": llama3_json_form,
    "llama4_pythonic": pythonic_form,
    "mistral": mistral_form,
    OPENAI: harmony_form,
    "pythonic": pythonic_form,
    "qwen3_coder": qwen3_coder_form,
}

_THINK = ("<think>", "</think>")
REASONING_PARSERS: Mapping[str, Thought | None] = {
    "deepseek_r1": Thought(*_THINK, begun=True, closed=("<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>")),
    "deepseek_v3": Thought(*_THINK),
    "glm45": Thought(*_THINK),
    "mistral": Thought("[THINK]", "[/THINK]", anywhere=True),
    GPT_OSS: None,
    "qwen3": Thought(*_THINK),
}
"""Reasoning formats by parser name. None: the parser handles reasoning and calls together."""

_TOOL_CALL = ("<tool_call>", "</tool_call>")
_PYTHON = ("<|python_start|>", "<|python_end|>")
_DEEPSEEK = tuple(f"<｜tool▁{word}｜>" for word in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
_KIMI = ("calls_section_begin", "calls_section_end", "call_begin", "call_argument_begin", "call_end")
_HARMONY = ("start", "channel", "constrain", "message", "end", "call", "return")
_MARKERS: Mapping[str, tuple[str, ...]] = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "glm45": (*_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "glm47": (*_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "hermes": _TOOL_CALL,
    "kimi_k2": tuple(f"<|tool_{word}|>" for word in _KIMI),
    "llama3_json": ("<|python_tag|>",),
    "llama4_pythonic": _PYTHON,
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    OPENAI: tuple(f"<|{word}|>" for word in _HARMONY),
    "pythonic": _PYTHON,
    "qwen3_coder": _TOOL_CALL,
}


def _always(source: Source) -> Wait[bool]:
    yield from ()
    return True


# Markers that begin a call even within unclosed reasoning: special tokens, and tags followed by a call.
_CALL_SIGNS: Mapping[str, Mapping[str, Sign]] = {
    "deepseek_v3": dict.fromkeys((_DEEPSEEK[0], _DEEPSEEK[2]), _always),
    "deepseek_v31": dict.fromkeys((_DEEPSEEK[0], _DEEPSEEK[2]), _always),
    "glm45": {_TOOL_CALL[0]: pair_follows},
    "glm47": {_TOOL_CALL[0]: pair_follows},
    "hermes": {_TOOL_CALL[0]: object_follows},
    "kimi_k2": dict.fromkeys((f"<|tool_{_KIMI[0]}|>", f"<|tool_{_KIMI[2]}|>"), _always),
    "llama4_pythonic": {_PYTHON[0]: _always},
    "mistral": {"[TOOL_CALLS]": _always},
    "pythonic": {_PYTHON[0]: _always},
    "qwen3_coder": {_TOOL_CALL[0]: function_follows},
}

PROMPT_TOKENS = 16
"""Tokens at the end of a prompt that show whether reasoning is open."""
TEMPLATE_TOKENS = 128
"""Tokens at the end of a prompt in which a response template finds the beginning of the answer."""


@dataclasses.dataclass(frozen=True)
class Parsers:
    """Names of the parsers for a model's answers. None: no parser.

    Attributes:
        template: the template of `RESPONSE_TEMPLATE`.
    """

    tool_calls: str | None = None
    reasoning: str | None = None
    template: ResponseTemplate | None = None

    @property
    def markers(self) -> frozenset[str]:
        """Marker texts of the parsers. Where they are special tokens, the detokenizer must keep them."""
        thought = self.thought
        around = (thought.begin, thought.end) if thought is not None else ()
        name = OPENAI if self.reasoning == GPT_OSS else self.tool_calls
        carried = self.template.markers if self._is_carried and self.template is not None else frozenset[str]()
        return carried.union(around, _MARKERS.get(name or "", ()))

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens that the parsers need from the end of the prompt."""
        return TEMPLATE_TOKENS if self._is_carried else PROMPT_TOKENS

    @property
    def _is_carried(self) -> bool:
        return RESPONSE_TEMPLATE in (self.tool_calls, self.reasoning)

    @property
    def thought(self) -> Thought | None:
        """Reasoning tags of the model; None: no reasoning, or not between two tags."""
        return REASONING_PARSERS.get(self.reasoning or "")

    def make(
        self, tools: Tools | None, *, prompt: str = "", new_id: Callable[[int], str] | None = None
    ) -> Parser | None:
        """Return a parser of one answer; None: the answer is plain text.

        Args:
            tools: the request's tools, or None: calls are not parsed.
            prompt: end of the prompt, with special tokens as text.
            new_id: makes the id of a call from its index. Default: random, in the format of the family's template.
        """
        if self.reasoning == GPT_OSS or self.tool_calls == OPENAI:
            return self._program(harmony, tools or Tools(), new_id)
        if self.reasoning == RESPONSE_TEMPLATE:
            return self._carried(tools or Tools(), prompt, new_id)
        first = self._thinking(tools, prompt)
        if tools is None or self.tool_calls is None:
            return first
        carried = self.tool_calls == RESPONSE_TEMPLATE
        open_ = prompt if first is None else ""  # reasoning that the prompt has begun belongs to the first parser
        second = self._carried(tools, open_, new_id) if carried else self._family(tools, new_id)
        return second if first is None else Chain(first, second)

    def _thinking(self, tools: Tools | None, prompt: str) -> Parser | None:
        thought = self.thought
        if thought is None:
            return None
        signs = _CALL_SIGNS.get(self.tool_calls or "", NO_SIGNS) if tools is not None else NO_SIGNS
        return ProgramParser(functools.partial(thought.read, prompt=prompt, calls=signs), str)

    def _carried(self, tools: Tools, prompt: str, new_id: Callable[[int], str] | None) -> Parser:
        if self.template is None:
            raise ValueError(f"{RESPONSE_TEMPLATE} without a template")
        return TemplateParser(self.template, tools, prompt, new_id or _long_id)

    def _family(self, tools: Tools, new_id: Callable[[int], str] | None) -> Parser:
        return self._program(TOOL_PARSERS[self.tool_calls or ""], tools, new_id)

    def _program(self, read: ToolFormat, tools: Tools, new_id: Callable[[int], str] | None) -> Parser:
        made = new_id or (_short_id if self.tool_calls == "mistral" else _long_id)
        hidden = _MARKERS.get(OPENAI if read is harmony else self.tool_calls or "", ())
        return ProgramParser(functools.partial(read, tools=tools), made, hidden)


def chosen(tool_calls: str, reasoning: str, template: str, carried: ResponseTemplate | None = None) -> Parsers:
    """Return the named parsers; "auto" detects them from the chat template, "off" is none.

    Args:
        carried: the tokenizer's response template, which parses calls and reasoning where `takes_carried`.

    Raises:
        KeyError: there is no parser of this name.
    """
    found, known = detect(template), REASONING_PARSERS
    if carried is not None and takes_carried(tool_calls, template):
        return Parsers(RESPONSE_TEMPLATE, RESPONSE_TEMPLATE if reasoning == AUTO else _named(reasoning, known), carried)
    return Parsers(
        found.tool_calls if tool_calls == AUTO else _named(tool_calls, TOOL_PARSERS),
        found.reasoning if reasoning == AUTO else _named(reasoning, known),
    )


def takes_carried(tool_calls: str, template: str) -> bool:
    """Return whether the response template is used: by name, or by "auto" if the chat template's family is unknown."""
    return tool_calls == RESPONSE_TEMPLATE or (tool_calls == AUTO and detect(template).tool_calls is None)


def detect(template: str) -> Parsers:
    """Return the parsers for the markers in a chat template."""
    reasoning, tool_calls = (
        next((name for name, *texts in signs if _has(template, texts)), None)
        for signs in (_REASONING_SIGNS, _TOOL_SIGNS)
    )
    return Parsers(tool_calls, reasoning)


def _has(template: str, texts: Sequence[str]) -> bool:
    return all((text.removeprefix("!") in template) != text.startswith("!") for text in texts)


# The first entry whose texts are all in the template wins; texts after "!" must be absent.
_TOOL_SIGNS: tuple[tuple[str, ...], ...] = (
    (OPENAI, "<|channel|>", "<|message|>"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>", "```json"),
    ("deepseek_v31", "<｜tool▁call▁begin｜>"),
    ("kimi_k2", "<|tool_calls_section_begin|>"),
    ("glm45", "<tool_call>", "<arg_key>"),
    ("qwen3_coder", "<function=", "<parameter=", "!<seed:tool_call>"),
    ("mistral", "[TOOL_CALLS]"),
    ("hermes", "<tool_call>", "!<invoke name=", "!<tool_calls>["),
    ("llama4_pythonic", "<|python_start|>"),
    ("pythonic", "[func_name1("),
    ("llama3_json", "<|start_header_id|>", '"parameters"'),
    ("llama3_json", "<|header_start|>", '"parameters"'),
)
_REASONING_SIGNS: tuple[tuple[str, ...], ...] = (
    (GPT_OSS, "<|channel|>", "<|message|>"),
    ("mistral", "[THINK]"),
    ("deepseek_v3", "<think>", "<｜Assistant｜>"),
    ("deepseek_r1", "</think>", "<｜Assistant｜>"),  # the reasoning's begin tag is not in the prompt
    ("glm45", "</think>", "<arg_key>"),
    ("qwen3", "</think>"),
)


def _named(name: str, parsers: Mapping[str, object]) -> str | None:
    if name == OFF:
        return None
    if name not in parsers:
        raise KeyError(name)
    return name


def _long_id(index: int) -> str:
    return f"call_{uuid.uuid4().hex}"


def _short_id(index: int) -> str:
    """Return an id that Mistral's templates accept: nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
