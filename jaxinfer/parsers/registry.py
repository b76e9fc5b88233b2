"""Parsers by name, the names of vLLM, and which of them a chat template asks for."""

from __future__ import annotations

import dataclasses
import functools
import secrets
import string
import uuid
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from jaxinfer.parsers.events import Emitter
from jaxinfer.parsers.harmony import harmony
from jaxinfer.parsers.hermes import hermes, llama3_json, mistral
from jaxinfer.parsers.parser import Chain, Parser, ProgramParser
from jaxinfer.parsers.pythonic import pythonic
from jaxinfer.parsers.source import Source, Wait
from jaxinfer.parsers.tagged import glm45, qwen3_coder
from jaxinfer.parsers.thought import Thought
from jaxinfer.parsers.tokens import deepseek, kimi_k2
from jaxinfer.parsers.tools import Tools

AUTO, OFF = "auto", "off"
OPENAI, GPT_OSS = "openai", "openai_gptoss"


@runtime_checkable
class ToolFormat(Protocol):
    """How a family writes calls: see `jaxinfer.parsers.parser.Program`."""

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

_THINK = ("<think>", "</think>")
REASONING_PARSERS: Mapping[str, Thought | None] = {
    "deepseek_r1": Thought(*_THINK, begun=True, closed=("<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>")),
    "deepseek_v3": Thought(*_THINK),
    "glm45": Thought(*_THINK),
    "mistral": Thought("[THINK]", "[/THINK]", anywhere=True),
    GPT_OSS: None,
    "qwen3": Thought(*_THINK),
}
"""None: it parses calls, too, and is not separated from that."""

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

PROMPT_TOKENS = 16
"""So many tokens of a prompt's end tell whether a thought is open."""


@dataclasses.dataclass(frozen=True)
class Parsers:
    """Names of the parsers of a model's answers. None: there is none."""

    tool_calls: str | None = None
    reasoning: str | None = None

    @property
    def markers(self) -> frozenset[str]:
        """Texts that the parsers look for. Some tokenizers have them as special tokens: answers must show these."""
        thought = self.thought
        around = (thought.begin, thought.end) if thought is not None else ()
        name = OPENAI if self.reasoning == GPT_OSS else self.tool_calls
        return frozenset(around + (_MARKERS[name] if name is not None else ()))

    @property
    def thought(self) -> Thought | None:
        """How a model tells its thought; None: it tells none, or other than between two tags."""
        return REASONING_PARSERS[self.reasoning] if self.reasoning is not None else None

    def make(
        self, tools: Tools | None, *, prompt: str = "", new_id: Callable[[int], str] | None = None
    ) -> Parser | None:
        """A parser of one answer; None: it is text and nothing else.

        Args:
            tools: the request's, or None: calls are not looked for.
            prompt: its end, special tokens written out.
            new_id: of a call by its index. Default: at random, in the form that the family's template wants.
        """
        if self.reasoning == GPT_OSS or self.tool_calls == OPENAI:
            return self._program(harmony, tools or Tools(), new_id)
        thought = self.thought
        first = None if thought is None else ProgramParser(functools.partial(thought.read, prompt=prompt), str)
        if tools is None or self.tool_calls is None:
            return first
        second = self._program(TOOL_PARSERS[self.tool_calls], tools, new_id)
        return second if first is None else Chain(first, second)

    def _program(self, read: ToolFormat, tools: Tools, new_id: Callable[[int], str] | None) -> Parser:
        made = new_id or (_short_id if self.tool_calls == "mistral" else _long_id)
        return ProgramParser(functools.partial(read, tools=tools), made)


def chosen(tool_calls: str, reasoning: str, template: str) -> Parsers:
    """The parsers that are named, or that a template asks for where "auto" is named; "off" is none.

    Raises:
        KeyError: there is no parser of this name.
    """
    found = detect(template)
    return Parsers(
        found.tool_calls if tool_calls == AUTO else _named(tool_calls, TOOL_PARSERS),
        found.reasoning if reasoning == AUTO else _named(reasoning, REASONING_PARSERS),
    )


def detect(template: str) -> Parsers:
    """The parsers for the markers that a chat template writes."""
    reasoning, tool_calls = (
        next((name for name, texts in signs if all(text in template for text in texts)), None)
        for signs in (_REASONING_SIGNS, _TOOL_SIGNS)
    )
    return Parsers(tool_calls, reasoning)


# The first whose texts are all there.
_TOOL_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (OPENAI, ("<|channel|>", "<|message|>")),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(params_name1=",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
)
_REASONING_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (GPT_OSS, ("<|channel|>", "<|message|>")),
    ("mistral", ("[THINK]",)),
    ("deepseek_v3", ("<think>", "<｜Assistant｜>")),
    ("deepseek_r1", ("</think>", "<｜Assistant｜>")),  # the thought's beginning is not in the prompt
    ("glm45", ("</think>", "<arg_key>")),
    ("qwen3", ("</think>",)),
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
    """Mistral's templates refuse all ids but those of nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
