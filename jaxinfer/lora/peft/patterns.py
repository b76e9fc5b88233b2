"""Regular expressions of adapters, matched with a bounded number of steps.

All alternatives advance together: each node of a pattern maps the set of positions where it begins to the set of those
where it may end. That decides whether a name matches, which is all that PEFT needs. Steps are counted, and one budget
covers a whole adapter.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable

from jaxinfer.lora.errors import AdapterError
from jaxinfer.parsers.pattern import MOST_CHARACTERS as LONGEST
from jaxinfer.parsers.pattern import (
    Assertion,
    Begin,
    Char,
    Concat,
    Either,
    Named,
    Node,
    PatternError,
    Repeat,
    read_pattern,
)

MOST_STEPS = 2_000_000

_PLAIN = re.compile(r"[\w.-]*")
_WORD = re.compile(r"\w")

Ends = int
"""A set of positions in a text: bit ``n`` is the position before character ``n``."""


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
    """A regular expression of PEFT.

    Raises:
        AdapterError: `read_pattern` rejects it; ``key`` names it in the message.
    """

    def __init__(self, text: str, key: str) -> None:
        try:
            self._node = read_pattern(text, whole=True)
        except PatternError as error:
            shown = text if len(text) <= 100 else text[:100] + "..."
            raise AdapterError(f"{key}: the regular expression {shown!r} {error}") from error

    def fullmatch(self, name: str, budget: Budget) -> bool:
        """Return whether all of ``name`` matches."""
        return bool(_Run(name, budget).ends(self._node, 1) >> len(name))


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


class _Run:
    """The match of a pattern against a text."""

    def __init__(self, text: str, budget: Budget) -> None:
        self._text, self._budget = text, budget
        self._places: dict[str, Ends] = {}

    def ends(self, node: Node, starts: Ends) -> Ends:
        """Return where a node may end that begins at one of ``starts``."""
        self._budget.spend(1)
        match node:
            case Char(one):
                return (starts & self._characters(one)) << 1
            case Concat(parts):
                return functools.reduce(lambda at, part: self.ends(part, at) if at else 0, parts, starts)
            case Either(options):
                return functools.reduce(operator.or_, (self.ends(option, starts) for option in options))
            case Repeat():
                return self._repeated(node, starts)
            case Named(_, part):
                return self.ends(part, starts)
            case Begin():
                return starts & 1
            case Assertion():
                return self._where_true(node, starts)

    def _characters(self, one: re.Pattern[str]) -> Ends:
        """Return the positions of the characters that match."""
        if one.pattern not in self._places:
            self._budget.spend(len(self._text))
            found = (1 << at for at, char in enumerate(self._text) if one.fullmatch(char))
            self._places[one.pattern] = sum(found)
        return self._places[one.pattern]

    def _repeated(self, node: Repeat, starts: Ends) -> Ends:
        for _ in range(node.least):
            before, starts = starts, self.ends(node.part, starts)
            if starts == before:  # also the empty set: more rounds change nothing
                break
        reached = new = starts
        left = len(self._text) + 1 if node.most is None else node.most - node.least
        while new and left > 0:
            new = self.ends(node.part, new) & ~reached
            reached, left = reached | new, left - 1
        return reached

    def _where_true(self, node: Assertion, starts: Ends) -> Ends:
        """Return the positions of ``starts`` where an assertion is true."""
        if node.part is None:
            words = self._characters(_WORD)
            return starts & (1 << len(self._text) if node.kind == "$" else words ^ words << 1)
        each = (1 << at for at in range(len(self._text) + 1) if starts >> at & 1)
        return sum(at for at in each if bool(self.ends(node.part, at)) is (node.kind == "?="))


def first_match(patterns: Iterable[tuple[Suffix, int | float]], name: str, budget: Budget) -> int | float | None:
    """Return the value of the first pattern that matches; None if none does."""
    return next((value for pattern, value in patterns if pattern.matches(name, budget)), None)
