"""Tool calls in each family's format with one perturbation: a generator of calls and of typical model errors."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxinfer.parsers.registry import Parsers

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "deep": {"type": "boolean"},
                    "near": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "options": {"$ref": "#/$defs/options"},
                },
                "$defs": {"options": {"type": "object"}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "write-file",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
PARAMETERS = {each["function"]["name"]: each["function"]["parameters"]["properties"] for each in TOOLS}

type Calls = list[tuple[str, dict[str, Any]]]
type Pieces = list[str]
"""Pieces of an answer, split at tags, heads and values."""
type Write = Callable[[random.Random, Any], str]
"""Writes the arguments of a call."""


@dataclasses.dataclass(frozen=True)
class Family:
    """Format of calls in a model family.

    Attributes:
        tags: markers of the format, which values may mention.
        write: returns the pieces of an answer.
        thinks: reasoning parser used with the family.
    """

    name: str
    tags: tuple[str, ...]
    write: Callable[[random.Random, Calls, Write], Pieces]
    thinks: str | None = None

    def parsers(self, *, thinks: bool = False) -> Parsers:
        return Parsers(self.name, "openai_gptoss" if self.name == "openai" else self.thinks if thinks else None)


# ---- calls

_WORDS = (
    "Rome",
    "two words",
    "x = 1;",
    "naïve 한국어 😀",
    "it's",
    'say "hi" now',
    "a\\b",
    "tab\there",
    "a < b",
    "{x: [1]}",
)
_JSON_TEXTS = ('{"a": [1, "b"]}', "[1, 2]", "null", "true", "3.5", '"quoted"')


def text(rng: random.Random, tags: Sequence[str], *, surrogates: bool) -> str:
    """Return a string; tags in it have other text on both sides in the same line."""
    if rng.random() < 0.15:
        return rng.choice(_JSON_TEXTS)
    words = rng.choices(_WORDS, k=rng.randint(1, 4))
    if rng.random() < 0.4:
        words.insert(rng.randint(1, len(words)), f"a {rng.choice(tags)} b")
    if surrogates and rng.random() < 0.1:
        words.append("\ud83d!")
    return rng.choice((" ", "\n", ", ")).join(words)


def value(rng: random.Random, parameter: str, tags: Sequence[str], *, surrogates: bool) -> Any:
    match parameter:
        case "days":
            return rng.randint(-5, 10**9)
        case "deep":
            return rng.random() < 0.5
        case "near":
            return rng.choice((None, 1.5, -2e-7, 0))
        case "tags":
            return [text(rng, tags, surrogates=surrogates) for _ in range(rng.randint(0, 3))]
        case "options":
            return {"a": {"b": [None, True, text(rng, tags, surrogates=surrogates)]}, "c": {}}
        case _:
            return text(rng, tags, surrogates=surrogates)


def calls_of(rng: random.Random, family: Family, *, surrogates: bool = True) -> Calls:
    found: Calls = []
    for name in rng.choices(sorted(PARAMETERS), k=rng.choice((1, 1, 1, 2, 3))):
        chosen = [each for each in PARAMETERS[name] if rng.random() < 0.6]
        rng.shuffle(chosen)
        found.append((name, {each: value(rng, each, family.tags, surrogates=surrogates) for each in chosen}))
    return found


# ---- formats of the families


def dumps(rng: random.Random, arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=rng.random() < 0.3, indent=rng.choice((None, None, 1)))


def _objects(rng: random.Random, calls: Calls, word: str, write: Write) -> list[Pieces]:
    return [["{", f'"name": "{name}"', ", ", f'"{word}": ', write(rng, arguments), "}"] for name, arguments in calls]


def _joined(parts: Sequence[Pieces], *between: str) -> Pieces:
    return [piece for place, part in enumerate(parts) for piece in [*(between if place else ()), *part]]


def hermes(rng: random.Random, calls: Calls, write: Write) -> Pieces:
    parts = _objects(rng, calls, "arguments", write)
    return _joined([["<tool_call>", "\n", *part, "\n", "</tool_call>"] for part in parts], "\n")


def llama3_json(rng: random.Random, calls: Calls, write: Write) -> Pieces:
    tag = ["<|python_tag|>"] if rng.random() < 0.5 else []
    return tag + _joined(_objects(rng, calls, "parameters", write), "; ")


def mistral(rng: random.Random, calls: Calls, write: Write) -> Pieces:
    if rng.random() < 0.5:
        return ["[TOOL_CALLS]", "[", *_joined(_objects(rng, calls, "arguments", write), ", "), "]"]
    args = ["[ARGS]"] if rng.random() < 0.5 else []
    return _joined([["[TOOL_CALLS]", name, *args, write(rng, arguments)] for name, arguments in calls])


def _bare(written: Any) -> str:
    return written if isinstance(written, str) else json.dumps(written)


def qwen3_coder(rng: random.Random, calls: Calls, write: Write) -> Pieces:
    parts = []
    for name, arguments in calls:
        pairs = [
            ["<parameter=", key, ">", "\n", _bare(each), "\n", "</parameter>", "\n"] for key, each in arguments.items()
        ]
        function = ["<function=", name, ">", "\n", *_joined(pairs), "</function>"]
        parts.append(["<tool_call>", "\n", *function, "\n", "</tool_call>"])
    return _joined(parts, "\n")


def glm45(rng: random.Random, calls: Calls, write: Write) -> Pieces:
    line = rng.choice(("", "\n"))
    parts = []
    for name, arguments in calls:
        pairs = [
            ["<arg_key>", key, "</arg_key>", line, "<arg_value>", _bare(each), "</arg_value>", line]
            for key, each in arguments.items()
        ]
        parts.append(["<tool_call>", name, line, *_joined(pairs), "</tool_call>"])
    return _joined(parts, "\n")


def _fenced(text: str) -> Pieces:
    return ["```json", "\n", text, "\n", "```"]


def deepseek_v3(rng: random.Random, calls: Calls, write: Write) -> Pieces:
    parts = [
        [_DEEPSEEK[2], "function", _DEEPSEEK[4], name, "\n", *_fenced(write(rng, arguments)), _DEEPSEEK[3]]
        for name, arguments in calls
    ]
    return [_DEEPSEEK[0], *_joined(parts, "\n"), _DEEPSEEK[1]]


def deepseek_v31(rng: random.Random, calls: Calls, write: Write) -> Pieces:
    parts = [
        ["<｜tool▁call▁begin｜>", name, "<｜tool▁sep｜>", write(rng, arguments), "<｜tool▁call▁end｜>"]
        for name, arguments in calls
    ]
    return ["<｜tool▁calls▁begin｜>", *_joined(parts), "<｜tool▁calls▁end｜>"]


def kimi_k2(rng: random.Random, calls: Calls, write: Write) -> Pieces:
    parts = [
        [
            _SECTION[2],
            "functions.",
            name,
            f":{place}",
            "<|tool_call_argument_begin|>",
            write(rng, arguments),
            _SECTION[3],
        ]
        for place, (name, arguments) in enumerate(calls)
    ]
    return ["<|tool_calls_section_begin|>", *_joined(parts), "<|tool_calls_section_end|>"]


def openai(rng: random.Random, calls: Calls, write: Write) -> Pieces:
    head = ("<|channel|>", "commentary", " to=", "functions.")
    parts = [
        [*head, name, " ", "<|constrain|>", "json", "<|message|>", write(rng, arguments), "<|call|>"]
        for name, arguments in calls
    ]
    return _joined(parts, "<|start|>", "assistant")


def pythonic(rng: random.Random, calls: Calls, write: Write) -> Pieces:
    parts = []
    for name, arguments in calls:
        pairs = [[key, "=", repr(each)] for key, each in arguments.items()]
        parts.append([name.replace("-", "_"), "(", *_joined(pairs, ", "), ")"])
    return ["[", *_joined(parts, ", "), "]"]


_TOOL_CALL = ("<tool_call>", "</tool_call>")
_DEEPSEEK = tuple(f"<｜tool▁{word}｜>" for word in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
_SECTION = tuple(f"<|tool_{word}|>" for word in ("calls_section_begin", "calls_section_end", "call_begin", "call_end"))
_CODER = (*_TOOL_CALL, "<function=", "</function>", "<parameter=", "</parameter>")
_GLM = (*_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_PYTHON = ("<|python_start|>", "<|python_end|>")
FAMILIES = [
    Family("hermes", _TOOL_CALL, hermes, "qwen3"),
    Family("llama3_json", ("<|python_tag|>",), llama3_json),
    Family("mistral", ("[TOOL_CALLS]", "[ARGS]"), mistral, "mistral"),
    Family("qwen3_coder", _CODER, qwen3_coder, "qwen3"),
    Family("glm45", _GLM, glm45, "glm45"),
    Family("deepseek_v3", _DEEPSEEK, deepseek_v3, "deepseek_r1"),
    Family("deepseek_v31", _DEEPSEEK, deepseek_v31, "deepseek_v3"),
    Family("kimi_k2", (*_SECTION, "<|tool_call_argument_begin|>"), kimi_k2, "qwen3"),
    Family("openai", tuple(f"<|{word}|>" for word in ("start", "channel", "message", "end", "call")), openai),
    Family("pythonic", _PYTHON, pythonic),
]
IN_TEXT = frozenset({"hermes", "qwen3_coder", "glm45"})
"""Families whose tags may occur in values; tags of the other families are special tokens."""


# ---- errors of models


def _place(rng: random.Random, pieces: Pieces, wanted: Callable[[str], bool]) -> int:
    return rng.choice([place for place, piece in enumerate(pieces) if wanted(piece)] or [0])


def _is_tag(piece: str) -> bool:
    return re.fullmatch(r"<.*[>=]|\[[A-Z_]+\]|[][{}()]|```\w*", piece) is not None


def drop(rng: random.Random, pieces: Pieces) -> Pieces:
    at = _place(rng, pieces, _is_tag)
    return pieces[:at] + pieces[at + 1 :]


def double(rng: random.Random, pieces: Pieces) -> Pieces:
    at = _place(rng, pieces, _is_tag)
    return pieces[: at + 1] + pieces[at:]


def move(rng: random.Random, pieces: Pieces) -> Pieces:
    at = _place(rng, pieces, _is_tag)
    rest = pieces[:at] + pieces[at + 1 :]
    to = rng.randint(0, len(rest))
    return [*rest[:to], pieces[at], *rest[to:]]


def cut(rng: random.Random, pieces: Pieces) -> Pieces:
    return pieces[: rng.randint(1, len(pieces))]


def comma(rng: random.Random, pieces: Pieces) -> Pieces:
    at = rng.randint(0, len(pieces))
    return [*pieces[:at], rng.choice((",", ", ", ";")), *pieces[at:]]


def letters(rng: random.Random, pieces: Pieces) -> Pieces:
    """Remove, replace or insert one character."""
    whole = "".join(pieces)
    at = rng.randrange(len(whole))
    return [whole[:at] + rng.choice(("", '"', "'", "<", "}", "\\", " ", "\n")) + whole[at + 1 :]]


def within_marker(rng: random.Random, pieces: Pieces) -> Pieces:
    at = _place(rng, pieces, _is_tag)
    inner = rng.randrange(len(pieces[at]) or 1)
    return [*pieces[:at], pieces[at][:inner], pieces[at], pieces[at][inner:], *pieces[at + 1 :]]


DAMAGES = [drop, double, move, cut, comma, letters, within_marker]
"""Perturbations after which a call or text must still be returned."""


def again(rng: random.Random, pieces: Pieces) -> Pieces:
    return pieces


def space(rng: random.Random, pieces: Pieces) -> Pieces:
    """Add white space around the calls."""
    return [rng.choice(("\n", " ", "\n\n")), *pieces, rng.choice(("\n", "  "))]


def respelt(rng: random.Random, pieces: Pieces) -> Pieces:
    """Change function names as models do, in addition to the names of the request's tools."""
    forms = ("functions.{}", "{}", "functions_{}", "{}:0", "tools.{}")
    found = []
    for piece, following in zip(pieces, [*pieces[1:], ""], strict=True):
        name = re.fullmatch(r'("name": ")?([a-z-_]+)(")?', piece)
        if name is not None and name[2].replace("_f", "-f") in PARAMETERS:
            form = rng.choice(forms[:3] if following == "(" else forms)
            found.append(f"{name[1] or ''}{form.format(name[2])}{name[3] or ''}")
        else:
            found.append(piece)
    return found


def more_members(rng: random.Random, pieces: Pieces) -> Pieces:
    """Add members to a call's object that the format does not have."""
    more = ('"id": "x1", ', '"type": "function", ', '"why": {"a": ["}", 1]}, ', '"thought": "so \\"be\\" it", ')
    found: Pieces = []
    for piece in pieces:
        found.append(piece)
        if len(found) > 1 and found[-2].startswith('"name": '):
            found.append(rng.choice(more))
    return found


def natural_end(rng: random.Random, pieces: Pieces) -> Pieces:
    """End the answer after a complete argument, as models do."""
    last = ("</parameter>", "</arg_value>", ")", ">")
    left = list(pieces)
    while rng.random() < 0.7 and left[-1] not in last and (_is_tag(left[-1]) or left[-1].isspace() or not left[-1]):
        left.pop()
    return pieces if "".join(left).rstrip().endswith(tuple(PARAMETERS)) else left


HARMLESS = [again, space, respelt, more_members, natural_end]
"""Perturbations after which the same calls must be returned."""


# ---- spellings of arguments


def python(rng: random.Random, arguments: Any) -> str:
    return repr(arguments)


def with_commas(rng: random.Random, arguments: Any) -> str:
    return re.sub(r"\}$", ", }", json.dumps(arguments))


def as_text(rng: random.Random, arguments: Any) -> str:
    return json.dumps(json.dumps(arguments, ensure_ascii=rng.random() < 0.5))


def twice(rng: random.Random, arguments: Any) -> str:
    more = "".join(f", {json.dumps(key)}: [0]" for key in arguments)
    return f"{json.dumps(arguments)[:-1]}{more}}}"


WRITES = [dumps, python, with_commas, as_text, twice]
"""Spellings that must be parsed to the same arguments."""


def chunkings(rng: random.Random, answer: str) -> list[list[str]]:
    """Return chunkings of the answer: by character, in two chunks, and in several."""
    found = [list(answer)]
    for most in (1, 8):
        cuts = sorted(rng.sample(range(1, len(answer)), min(len(answer) - 1, most))) if len(answer) > 1 else []
        found.append([answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)])
    return found
