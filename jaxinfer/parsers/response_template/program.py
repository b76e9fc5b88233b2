"""Compilation of patterns to programs, run by `jaxinfer.parsers.response_template.search`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from jaxinfer.parsers.pattern import (
    Begin,
    Char,
    Concat,
    Either,
    Named,
    Node,
    PatternError,
    Repeat,
    names,
    read_pattern,
    runs,
)

MOST_INSTRUCTIONS = 512
"""Maximum instructions of a program, which bounds the cost per character."""
_MOST_CACHED = 512
CHAR, SPLIT, SAVE, BEGIN, MATCH = range(5)
_OPPOSITE = {r"\S": r"\s", r"\W": r"\w", r"\D": r"\d"}


class Instruction(NamedTuple):
    """An instruction. ``one``: for CHAR; ``first`` and ``second``: targets, for SPLIT; ``first``: slot, for SAVE."""

    kind: int
    one: re.Pattern[str] | None = None
    first: int = 0
    second: int = 0


class Program:
    """A compiled pattern.

    Attributes:
        names: names of the groups; group i begins at slot 2 i and ends at slot 2 i + 1.
        runs: literal texts of the pattern, see `jaxinfer.parsers.pattern.runs`.
    """

    def __init__(self, code: Sequence[Instruction], kept: Sequence[str], literal: Sequence[str] = ()) -> None:
        self.code, self.names, self.runs = code, kept, literal
        self._quiet: dict[tuple[tuple[int, ...], bool], re.Pattern[str] | None] = {}

    def quiet_until(self, places: tuple[int, ...], *, seeding: bool) -> re.Pattern[str] | None:
        """Return the class of characters that may change the state of a search with threads at these instructions, and
        at the beginning of the pattern if ``seeding``: after any other character it has the same threads.

        Returns:
            None: every character may.
        """
        if (places, seeding) not in self._quiet:
            if len(self._quiet) == _MOST_CACHED:
                self._quiet.clear()
            self._quiet[places, seeding] = _quiet_until(self, places, seeding=seeding)
        return self._quiet[places, seeding]

    def after(self, places: Sequence[int]) -> Sequence[int]:
        """Return the CHAR instructions reachable from these without consuming a character, in order of preference, not
        at the beginning of the text; -1: a match."""
        found: list[int] = []
        seen, stack = set[int](), list(reversed(places))
        while stack:
            place = stack.pop()
            if place in seen:
                continue
            seen.add(place)
            step = self.code[place]
            if step.kind in (CHAR, MATCH):
                found.append(place if step.kind == CHAR else -1)
            stack += {SPLIT: [step.second, step.first], SAVE: [place + 1]}.get(step.kind, [])
        return found


def compiled(pattern: str | Node) -> Program:
    """Compile a pattern, or its tree.

    Raises:
        PatternError: see `read_pattern`; or its program has more than `MOST_INSTRUCTIONS`.
    """
    node = read_pattern(pattern) if isinstance(pattern, str) else pattern
    kept = sorted(names(node))
    compiler = _Compiler({name: 2 * index for index, name in enumerate(kept)})
    compiler.write(node)
    compiler.add(Instruction(MATCH))
    return Program(compiler.code, kept, runs(node))


class _Compiler:
    def __init__(self, slots: dict[str, int]) -> None:
        self.code: list[Instruction] = []
        self._slots = slots

    def add(self, step: Instruction) -> int:
        """Append an instruction; return its index."""
        if len(self.code) == MOST_INSTRUCTIONS:
            raise PatternError(f"is too large: its program has more than {MOST_INSTRUCTIONS} steps")
        self.code.append(step)
        return len(self.code) - 1

    def write(self, node: Node) -> None:
        match node:
            case Char() | Begin():
                self.add(Instruction(CHAR, node.one) if isinstance(node, Char) else Instruction(BEGIN))
            case Concat(parts):
                for part in parts:
                    self.write(part)
            case Either(options):
                self._either(options)
            case Repeat():
                self._repeat(node)
            case Named(name, part):
                self._named(self._slots[name], part)

    def _either(self, options: Sequence[Node]) -> None:
        ends = []
        for option in options[:-1]:
            split = self.add(Instruction(SPLIT))
            self.write(option)
            ends.append(self.add(Instruction(SPLIT)))
            self._split(split, split + 1, len(self.code), lazy=False)
        self.write(options[-1])
        for end in ends:
            self._split(end, len(self.code), len(self.code), lazy=False)

    def _repeat(self, node: Repeat) -> None:
        for _ in range(node.least):
            self.write(node.part)
        splits = []
        for _ in range(1 if node.most is None else node.most - node.least):
            splits.append(self.add(Instruction(SPLIT)))
            self.write(node.part)
        if node.most is None:
            self.add(Instruction(SPLIT, None, splits[0], splits[0]))
        for split in splits:
            self._split(split, split + 1, len(self.code), lazy=node.lazy)

    def _named(self, slot: int, part: Node) -> None:
        self.add(Instruction(SAVE, None, slot))
        self.write(part)
        self.add(Instruction(SAVE, None, slot + 1))

    def _split(self, place: int, first: int, second: int, *, lazy: bool) -> None:
        places = (second, first) if lazy else (first, second)
        self.code[place] = Instruction(SPLIT, None, *places)


def _quiet_until(program: Program, places: Sequence[int], *, seeding: bool) -> re.Pattern[str] | None:
    waiting = [*places, *(place for place in program.after([0]) if seeding and place not in places)]
    if -1 in waiting:
        return None
    ones = [program.code[place].one for place in waiting]
    patterns = ["" if one is None else one.pattern for one in ones]
    common = [place for place, pattern in zip(waiting, patterns, strict=True) if _is_common(pattern)]
    if list(program.after([place + 1 for place in common])) != list(places):
        return None
    rare = [_complement(pattern) if _is_common(pattern) else pattern for pattern in patterns]
    return re.compile("|".join(dict.fromkeys(each for each in rare if each)) or r"(?!)", re.DOTALL)


def _is_common(pattern: str) -> bool:
    """Return whether a class contains nearly all characters."""
    return pattern == "." or pattern.startswith("[^") or pattern in _OPPOSITE


def _complement(pattern: str) -> str:
    return "" if pattern == "." else _OPPOSITE.get(pattern) or f"[{pattern[2:]}"
