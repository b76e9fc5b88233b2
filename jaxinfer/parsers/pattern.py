"""Regular expressions from checkpoints and adapters, parsed for matching without backtracking.

Python's `re` backtracks, sometimes exponentially, and cannot be interrupted. The subset: literals, classes, groups,
alternatives, repetitions, the beginning of the text and, where texts are matched as a whole, its end, word boundaries
and lookahead. All other constructs are rejected by name.

The package `regex` has a timeout for matching, but none for compilation, which expands repetitions: some short patterns
hang there, others crash the process. And its partial matches end before the text does: ``</think>\\s*`` has a
complete match at ``</think>``, whatever follows.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Sequence
from typing import NoReturn

MOST_CHARACTERS = 2000
"""Characters of a pattern."""
_MOST_DEPTH = 32
_MOST_TIMES = 256

_QUANTIFIER = re.compile(r"[*+?]|\{([0-9]*),([0-9]*)\}|\{([0-9]+)\}")
_CLASSES = "dDsSwW"
_PLAIN_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[tnrfva]|[^0-9a-zA-Z])")
_CLASS_END = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_NAME = re.compile(r"\?P<([A-Za-z_]\w*)>")
_TIMES = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class PatternError(ValueError):
    """An invalid or unsupported regular expression; the message names the construct."""


@dataclasses.dataclass(frozen=True, slots=True)
class Char:
    """A single character. ``one``: its regular expression; ``literal``: the only character that matches, else ""."""

    one: re.Pattern[str]
    literal: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Begin:
    """Anchor at the beginning of the text."""


@dataclasses.dataclass(frozen=True, slots=True)
class Assertion:
    """Zero-width assertion: ``$``, ``\\b``, or a lookahead (``?=``, ``?!``) for ``part``."""

    kind: str
    part: Node | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Concat:
    """Concatenation of nodes."""

    parts: tuple[Node, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Either:
    """Alternatives; the first that matches is preferred."""

    options: tuple[Node, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Repeat:
    """Repetition, ``least`` to ``most`` times (None: unbounded); greedy or, if ``lazy``, as few as possible."""

    part: Node
    least: int
    most: int | None
    lazy: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """A named group, whose text is captured."""

    name: str
    part: Node


type Node = Char | Begin | Assertion | Concat | Either | Repeat | Named


def read_pattern(text: str, *, whole: bool = False) -> Node:
    """Parse a regular expression, in which "." matches every character.

    Args:
        whole: it is matched against whole texts, with `jaxinfer.lora.peft.patterns`: assertions, any number of
            repetitions, and repetitions of what may be empty are supported.

    Raises:
        PatternError: it is invalid, too long, or has unsupported constructs.
    """
    if len(text) > MOST_CHARACTERS:
        raise PatternError(f"has {len(text)} characters; {MOST_CHARACTERS} are supported")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # about nested sets, whose meaning may change
            re.compile(text, re.DOTALL)
    except (re.error, FutureWarning, DeprecationWarning, OverflowError, RecursionError) as error:
        raise PatternError(f"is no regular expression: {error}") from error
    return _Reader(text, whole).read()


def literals(*texts: str) -> Node:
    """Return the alternatives of texts, longest first."""
    ordered = sorted(dict.fromkeys(texts), key=len, reverse=True)
    return Either(tuple(Concat(tuple(_literal(character) for character in text)) for text in ordered))


class _Reader:
    """Parser of a pattern that Python has accepted."""

    def __init__(self, text: str, whole: bool) -> None:
        self._text, self._at, self._depth, self._whole = text, 0, 0, whole

    def read(self) -> Node:
        node = self._either()
        if self._at < len(self._text):
            self._refuse("an inner end")
        return node

    def _either(self) -> Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Either(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._atom()))
        return Concat(tuple(parts))

    def _repeated(self, part: Node) -> Node:
        match = _QUANTIFIER.match(self._text, self._at)
        if match is None:
            return part
        self._at = match.end()
        if self._take("+"):
            self._refuse("a possessive repetition")
        least, most = _times(match)
        if max(least, most or 0) > _MOST_TIMES and not self._whole:
            self._refuse(f"more than {_MOST_TIMES} repetitions")
        if most != 1 and not self._whole and can_be_empty(part, at_begin=True):
            self._refuse("a repetition of what may be nothing")
        return Repeat(part, least, most, lazy=self._take("?"))

    def _atom(self) -> Node:
        character = self._text[self._at]
        if character == "[":
            return self._set()
        self._at += 1
        if character == "\\":
            return self._escape()
        if character == "(":
            return self._group()
        if character == "$":
            return self._assertion(character, "the text's end ($)")
        return Begin() if character == "^" else _ANY if character == "." else _literal(character)

    def _set(self) -> Node:
        match = _CLASS_END.match(self._text, self._at)
        if match is None:
            self._refuse("a set without an end")
        self._at = match.end()
        return Char(re.compile(match[0], re.DOTALL))

    def _escape(self) -> Node:
        character = self._text[self._at]
        if character in _CLASSES:
            self._at += 1
            return Char(re.compile(f"\\{character}"))
        if self._take("A"):
            return Begin()
        if self._take("b"):
            return self._assertion(r"\b", r"\b")
        match = _PLAIN_ESCAPE.match(self._text, self._at - 1)
        if match is None:
            self._refuse("a back reference" if character.isdigit() else f"\\{character}")
        self._at = match.end()
        return Char(re.compile(match[0]), literal=_meant(match[0]))

    def _assertion(self, kind: str, what: str) -> Node:
        if not self._whole:
            self._refuse(what)
        return Assertion(kind)

    def _group(self) -> Node:
        name = _NAME.match(self._text, self._at)
        ahead = next((kind for kind in ("?=", "?!") if self._whole and self._take(kind)), "")
        if name is not None:
            self._at = name.end()
        elif not ahead and self._text.startswith("?", self._at) and not self._take("?:"):
            self._refuse(f"({self._text[self._at : self._at + 2]}")
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            self._refuse(f"more than {_MOST_DEPTH} groups in one another")
        node = self._either()
        self._depth -= 1
        self._at += 1
        if ahead:
            return Assertion(ahead, node)
        return node if name is None else Named(name[1], node)

    def _take(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _refuse(self, what: str) -> NoReturn:
        raise PatternError(f"has {what} near character {self._at}, which is not supported")


def _times(match: re.Match[str]) -> tuple[int, int | None]:
    if match[0] in _TIMES:
        return _TIMES[match[0]]
    if match[3]:
        return int(match[3]), int(match[3])
    return int(match[1] or 0), int(match[2]) if match[2] else None


def _literal(character: str) -> Char:
    return Char(re.compile(re.escape(character)), literal=character)


def _meant(escape: str) -> str:
    """Return the character of an escape."""
    known = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
    if escape[1] in "xuU":
        return chr(int(escape[2:], 16))
    return known.get(escape[1], escape[1])


_ANY = Char(re.compile(".", re.DOTALL))


# ---- queries on a tree


def can_be_empty(node: Node, *, at_begin: bool = False) -> bool:
    """Return whether it matches the empty string, at the beginning of the text (``at_begin``) or elsewhere."""
    match node:
        case Char() | Begin():
            return at_begin and isinstance(node, Begin)
        case Concat(parts):
            return all(can_be_empty(part, at_begin=at_begin) for part in parts)
        case Either(options):
            return any(can_be_empty(option, at_begin=at_begin) for option in options)
        case Repeat(part, least):
            return least == 0 or can_be_empty(part, at_begin=at_begin)
        case Named(_, part):
            return can_be_empty(part, at_begin=at_begin)
        case Assertion():
            return True


def names(node: Node) -> frozenset[str]:
    """Return the names of the named groups."""
    match node:
        case Concat(parts) | Either(parts):
            return frozenset().union(*map(names, parts))
        case Repeat(part):
            return names(part)
        case Named(name, part):
            return names(part) | {name}
        case _:
            return frozenset()


def runs(node: Node) -> Sequence[str]:
    """Return the literal runs: maximal texts of consecutive literal characters in the pattern."""
    match node:
        case Char(literal=literal):
            return [literal] if literal else []
        case Concat(parts):
            return _joined(parts)
        case Either(options):
            return [run for option in options for run in runs(option)]
        case Repeat(part) | Named(_, part):
            return runs(part)
        case Begin() | Assertion():
            return []


def _joined(parts: Sequence[Node]) -> Sequence[str]:
    found = [""]
    for part in parts:
        if isinstance(part, Char) and part.literal:
            found[-1] += part.literal
        else:
            found += [*runs(part), ""]
    return [run for run in found if run]
