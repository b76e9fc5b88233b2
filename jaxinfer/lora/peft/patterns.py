"""Untrusted regular expressions, matched with a bounded number of steps.

Python's ``re`` backtracks and may take time exponential in the pattern; here all alternatives advance together: each
sub-pattern maps a set of positions to the set of positions where it may end. That decides whether a name matches, which
is all that PEFT needs. Steps are counted, and one budget covers a whole adapter.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Sequence

from jaxinfer.lora.errors import AdapterError

LONGEST = 2000  # characters of a pattern
DEEPEST = 20  # nested groups
MOST_STEPS = 2_000_000

_PLAIN = re.compile(r"[\w.-]*")
_ESCAPED = re.compile(r"\\[dDwWsS]|\\[^\w]", re.ASCII)
_ODD_IN_CLASS = ("[", "--", "&&", "||", "~~")  # `re` warns that their meaning may change
_COUNT = re.compile(r"\{(\d{0,4})(,?)(\d{0,4})\}", re.ASCII)
_WORD = re.compile(r"\w")

Ends = int
"""A set of positions in a text: bit ``n`` is the position before character ``n``."""


class _Run:
    """A text to be matched."""

    def __init__(self, text: str, budget: Budget) -> None:
        self.text, self.budget = text, budget
        self._places: dict[str, int] = {}

    def places(self, one: re.Pattern[str]) -> Ends:
        """Return the positions of the characters that match."""
        self.budget.spend(1)
        if one.pattern not in self._places:
            self.budget.spend(len(self.text))
            found = (1 << at for at, char in enumerate(self.text) if one.fullmatch(char))
            self._places[one.pattern] = sum(found)
        return self._places[one.pattern]


_Node = Callable[[_Run, Ends], Ends]


class Budget:
    """Remaining steps for all patterns of an adapter.

    Raises:
        AdapterError: from `spend`, when none are left.
    """

    def __init__(self, steps: int = MOST_STEPS) -> None:
        self._left = steps

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise AdapterError("the regular expressions of the adapter take too long on this model's names")


class Pattern:
    """A regular expression of PEFT: literals, ``.``, classes, groups, alternatives, repetition, lookahead, ``^ $ \\b``.

    Raises:
        AdapterError: it is longer than `LONGEST`, malformed, or uses other syntax; ``key`` names it in the message.
    """

    def __init__(self, text: str, key: str) -> None:
        if len(text) > LONGEST:
            raise AdapterError(f"{key}: a regular expression of {len(text)} characters is longer than {LONGEST}")
        self._whole = _Parser(text, key).parse()

    def fullmatch(self, name: str, budget: Budget) -> bool:
        """Return whether all of ``name`` matches."""
        return bool(self._whole(_Run(name, budget), 1) >> len(name))


class Suffix:
    """A key of ``rank_pattern`` or ``alpha_pattern``: matches the end of a module's path, from a dot or its start."""

    def __init__(self, text: str, key: str) -> None:
        plain = len(text) <= LONGEST and _PLAIN.fullmatch(text)
        # no repetition within the key: `re` takes at most quadratic time
        self._plain = re.compile(rf"(?s:.*\.)?{text}") if plain else None
        self._pattern = None if plain else Pattern(rf"(.*\.)?({text})", key)

    def matches(self, name: str, budget: Budget) -> bool:
        if self._plain is not None:
            budget.spend(len(name))
            return self._plain.fullmatch(name) is not None
        assert self._pattern is not None
        return self._pattern.fullmatch(name, budget)


class _Parser:
    """Recursive-descent parser; each method parses from ``at`` and returns a function of positions."""

    def __init__(self, text: str, key: str) -> None:
        self._text, self._key, self._at, self._depth = text, key, 0, 0

    def parse(self) -> _Node:
        node = self._alternatives()
        if self._at < len(self._text):
            raise self._error("an unmatched )")
        return node

    def _error(self, what: str) -> AdapterError:
        shown = self._text if len(self._text) <= 100 else self._text[:100] + "..."
        return AdapterError(f"{self._key}: {what} in the regular expression {shown!r}")

    def _next(self, word: str) -> bool:
        if found := self._text.startswith(word, self._at):
            self._at += len(word)
        return found

    def _alternatives(self) -> _Node:
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._error(f"more than {DEEPEST} groups within one another")
        ways = [self._sequence()]
        while self._next("|"):
            ways.append(self._sequence())
        self._depth -= 1
        return ways[0] if len(ways) == 1 else _either(ways)

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._atom()))
        return _in_order(parts)

    def _repeated(self, node: _Node) -> _Node:
        for sign, least, most in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self._next(sign):
                self._next("?")  # lazy quantifier: the same set of ends
                return _repeat(node, least, most)
        if (found := _COUNT.match(self._text, self._at)) is None:
            return node
        self._at = found.end()
        self._next("?")
        low, comma, high = found.groups()
        if not comma and not low:
            raise self._error("an empty count")
        return _repeat(node, int(low or 0), (int(high) if high else None) if comma else int(low))

    def _atom(self) -> _Node:
        if self._next("("):
            return self._group()
        for sign, node in (("^", _start), ("$", _end), (r"\b", _border)):
            if self._next(sign):
                return node
        return _character(self._one_character())

    def _group(self) -> _Node:
        kind = next((kind for kind in ("?:", "?=", "?!") if self._next(kind)), "")
        if not kind and self._next("?"):
            raise self._error("a group of a kind that is not supported")
        node = self._alternatives()
        if not self._next(")"):
            raise self._error("an unmatched (")
        return node if kind in ("", "?:") else _look(node, ahead=kind == "?=")

    def _one_character(self) -> re.Pattern[str]:
        if self._text[self._at] == "[":
            return self._class()
        if (escaped := _ESCAPED.match(self._text, self._at)) is not None:
            self._at = escaped.end()
            return re.compile(escaped[0])
        char = self._text[self._at]
        if char in "\\*+?":
            raise self._error(f"{char} where it is not supported")
        self._at += 1
        return re.compile("." if char == "." else re.escape(char))

    def _class(self) -> re.Pattern[str]:
        found = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]").match(self._text, self._at)
        if found is None or any(odd in found[0][1:] for odd in _ODD_IN_CLASS):
            raise self._error("a malformed class of characters")
        self._at = found.end()
        try:
            return re.compile(found[0])
        except re.error as error:
            raise self._error(f"a malformed class of characters ({error})") from None


def _character(one: re.Pattern[str]) -> _Node:
    return lambda run, starts: (starts & run.places(one)) << 1


def _in_order(parts: Sequence[_Node]) -> _Node:
    def ends(run: _Run, starts: Ends) -> Ends:
        for part in parts:
            run.budget.spend(1)
            if not starts:
                break
            starts = part(run, starts)
        return starts

    return ends


def _either(ways: Sequence[_Node]) -> _Node:
    return lambda run, starts: functools.reduce(operator.or_, (way(run, starts) for way in ways))


def _repeat(node: _Node, least: int, most: int | None) -> _Node:
    def ends(run: _Run, starts: Ends) -> Ends:
        for _ in range(least):
            run.budget.spend(1)
            before, starts = starts, node(run, starts)
            if starts == before:  # also the empty set: more rounds change nothing
                break
        reached = new = starts
        left = len(run.text) + 1 if most is None else most - least
        while new and left > 0:
            run.budget.spend(1)
            new = node(run, new) & ~reached
            reached, left = reached | new, left - 1
        return reached

    return ends


def _look(node: _Node, ahead: bool) -> _Node:
    def ends(run: _Run, starts: Ends) -> Ends:
        each = (1 << at for at in range(len(run.text) + 1) if starts >> at & 1)
        return sum(at for at in each if bool(node(run, at)) is ahead)

    return ends


def _start(run: _Run, starts: Ends) -> Ends:
    del run
    return starts & 1


def _end(run: _Run, starts: Ends) -> Ends:
    return starts & 1 << len(run.text)


def _border(run: _Run, starts: Ends) -> Ends:
    words = run.places(_WORD)
    return starts & (words ^ words << 1)


def first_match(patterns: Iterable[tuple[Suffix, int | float]], name: str, budget: Budget) -> int | float | None:
    """Return the value of the first pattern that matches; None if none does."""
    return next((value for pattern, value in patterns if pattern.matches(name, budget)), None)
