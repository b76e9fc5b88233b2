"""Compilation of structural tags to llguidance grammars. No jax.

Free text is one lexeme, up to and including the text that ends it: the library's lexer is greedy, so such a lexeme is
lazy and includes its end. A special token ends a lexeme by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxinfer.structured import lark
from jaxinfer.structured.tree import (
    AnyText,
    Const,
    Either,
    Grammar,
    Json,
    Node,
    Regex,
    Repeat,
    Row,
    Tag,
    Triggered,
    read,
    unlimited,
)

type Atom = str | int | Node
"""A text without special tokens, a special token, or a composite node."""


class Held(NamedTuple):
    """Grammar of a structural tag.

    Attributes:
        grammars: list of grammars in llguidance's format.
        schemas: JSON schemas in it, each with its path and a rule for it.
    """

    grammars: Sequence[Mapping[str, Any]]
    schemas: Sequence[tuple[str, str]]


def held(text: str, special: Mapping[str, int]) -> Held:
    """Return the grammar of a structural tag.

    Args:
        special: special tokens by their texts. All other text is plain.

    Raises:
        ValueError: it is not a structural tag; names the field.
    """
    writer = _Writer(special)
    start = writer.node(read(text))
    lines = [f"start: {start}", *(f"{name}: {body}" for name, body in writer.rules.items())]
    return Held([_grammar("tags", "\n".join(lines)), *writer.others], writer.schemas)


def _grammar(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "lark_grammar": lark.HEADER + text}


class _Writer:
    """Rule writer. Methods return the rule body for a node and the texts that end it.

    Attributes:
        rules: bodies by name. Names in capitals are lexemes.
        others: additional grammars.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self.rules: dict[str, str] = {}
        self.others: list[dict[str, Any]] = []
        self.schemas: list[tuple[str, str]] = []
        self._special = special
        names = "|".join(re.escape(each) for each in sorted(special, key=len, reverse=True))
        self._names = re.compile(f"({names})" if names else r"((?!))")
        self._known: dict[str, str] = {}

    def node(self, node: Node, ends: Sequence[str] = ()) -> str:
        """Return the rule body of a node. ``ends``: alternative texts that follow it; empty: no text follows."""
        if not unlimited(node):
            return self._runs([*self._atoms(node), *self._closed(ends)])
        return self._open(node, ends)

    def _open(self, node: Node, ends: Sequence[str]) -> str:
        match node:
            case AnyText():
                return self._until(node.excludes, ends)
            case Triggered():
                return self._triggered(node, ends)
            case Row(elements=[*first, last]):
                return f"{self._runs(self._atoms(Row(first)))} {self.node(last, ends)}"
            case Tag(begin, content):
                return self.node(Row([Const(begin), content]), ends)
            case Either():
                return _either(self.node(each, ends) for each in node.elements)
        return self._left_out(node, ends)

    def _left_out(self, node: Node, ends: Sequence[str]) -> str:
        """Return the rule body of an optional node."""
        assert isinstance(node, Repeat)
        return _either([self.node(node.content, ends), self._runs(self._closed(ends))])

    # ---- texts

    def _pieces(self, text: str) -> list[str | int]:
        """Split a text into special tokens and the texts between them."""
        return [self._special.get(each, each) for each in self._names.split(text) if each]

    def _const(self, text: str) -> str:
        return " ".join(map(_piece, self._pieces(text))) or '""'

    def _until(self, excludes: Iterable[str], ends: Sequence[str]) -> str:
        """Return free text up to and including one of ``ends``."""
        without = self._rule("TEXT", lark.text_without(sorted({*excludes, *ends})))
        return _either(self._up_to(without, end) for end in ends) if ends else without

    def _up_to(self, text: str, end: str) -> str:
        first, *rest = self._pieces(end)
        if isinstance(first, int):
            return " ".join([text, *map(_piece, [first, *rest])])
        if rest:
            return " ".join([self._rule("TEXT", f"{text} {_piece(first)}"), *map(_piece, rest)])
        return self._rule("text", f"{text} {_piece(first)}", "[lazy]")

    # ---- nodes with a definite end

    def _atoms(self, node: Node) -> list[Atom]:
        """Return the atoms of a node, in order."""
        match node:
            case Const():
                return [*self._pieces(node.value)]
            case Row():
                return [atom for each in node.elements for atom in self._atoms(each)]
            case Tag() if unlimited(node.content):
                return [*self._pieces(node.begin), Tag("", node.content, node.ends)] if node.begin else [node]
            case Tag():
                return [*self._pieces(node.begin), *self._atoms(node.content), *self._closed(node.ends)]
            case _:
                return [node]

    def _closed(self, ends: Sequence[str]) -> list[Atom]:
        return [*self._pieces(ends[0])] if len(ends) == 1 else [Either([*map(Const, ends)])] if ends else []

    def _runs(self, atoms: Sequence[Atom]) -> str:
        """Merge adjacent regular atoms into one lexeme, including the first lexeme of each alternative that follows:
        the lexer takes the longest match, so of two lexemes with a common prefix the shorter would be lost."""
        said, run = [], list[Atom]()
        for atom in atoms:
            if self._regular(atom) is not None:
                run.append(atom)
                continue
            if isinstance(atom, Either):
                said.append(_either(self._runs([*run, *self._atoms(each)]) for each in atom.elements))
            else:
                said += [self._lexeme(run), self._limited(atom)]
            run = []
        return " ".join(filter(None, [*said, self._lexeme(run)])) or '""'

    def _lexeme(self, run: Sequence[Atom]) -> str:
        if all(isinstance(each, str) for each in run):
            return json.dumps("".join(map(str, run))) if run else ""
        return self._rule("REGEX", " ".join(str(self._regular(each)) for each in run))

    def _limited(self, atom: Atom) -> str:
        match atom:
            case int():
                return _piece(atom)
            case Json():
                return self._json(atom)
            case Grammar():
                return self._other(atom)
            case Repeat():
                return f"({self.node(atom.content)}){_times(atom)}"
            case Triggered():
                return _either(map(self.node, atom.tags))
        assert isinstance(atom, Tag)
        return self.node(atom.content, atom.ends)

    def _regular(self, atom: Atom) -> str | None:
        """Return the regular expression of an atom; None: it has none."""
        match atom:
            case str():
                return json.dumps(atom)
            case Regex():
                return _expression(atom)
            case Either():
                return _together(map(self._regular, atom.elements), " | ")
            case Repeat():
                content = self._regular(atom.content)
                return None if content is None else f"({content}){_times(atom)}"
            case Const() | Row() | Tag() if (atoms := self._atoms(atom)) != [atom]:
                return _together(map(self._regular, atoms), " ")
        return None

    def _triggered(self, node: Triggered, ends: Sequence[str]) -> str:
        called, never = [], {*node.triggers, *node.excludes, *ends}
        for trigger, those in self._by_trigger(node).items():
            rest = _either(self.node(Tag(tag.begin.removeprefix(trigger), tag.content, tag.ends)) for tag in those)
            called.append(f"{self._until(never, [trigger])} {rest}")
        more, rest = self._rule("called", " | ".join(called)), self._until(never, ends)
        if not node.at_least_one:
            return f"({more} {self._runs(self._closed(ends))} | {rest})" if node.stop_after_first else f"{more}* {rest}"
        return f"{_either(map(self.node, node.tags))} {more}* {rest}"

    def _by_trigger(self, node: Triggered) -> dict[str, list[Tag]]:
        """Return tags by effective trigger: a trigger may be a prefix of a special token's text."""
        found: dict[str, list[Tag]] = {}
        for tag in node.tags:
            trigger = next(each for each in node.triggers if tag.begin.startswith(each))
            longer = (each for each in self._special if tag.begin.startswith(each) and each.startswith(trigger))
            found.setdefault(next(longer, trigger), []).append(tag)
        return found

    def _json(self, node: Json) -> str:
        rule = lark.schema(node.schema, lark.SPACED, node.place)
        if rule not in self._known:
            self.schemas.append((node.place, rule))
        return self._rule("json", rule)

    def _other(self, node: Grammar) -> str:
        if node.text not in self._known:
            self._known[node.text] = f"grammar{len(self.others)}"
            self.others.append(_grammar(self._known[node.text], lark.grammar(node.text)))
        return f"@{self._known[node.text]}"

    def _rule(self, name: str, body: str, options: str = "") -> str:
        """Return the name of a rule, created once."""
        key = options + body
        if key not in self._known:
            self._known[key] = f"{name}{len(self.rules)}"
            self.rules[self._known[key] + options] = body
        return self._known[key]


def _piece(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece)


def _expression(node: Regex) -> str:
    without = f" & ({lark.text_without(node.excludes)})" if node.excludes else ""
    return f"({lark.regex(node.pattern)}{without})"


def _together(parts: Iterable[str | None], joint: str) -> str | None:
    """Join regular expressions into one; None if one of them is None."""
    found = list(parts)
    return None if None in found else f"({joint.join(map(str, found))})"


def _either(those: Iterable[str]) -> str:
    return f"({' | '.join(those)})"


def _times(node: Repeat) -> str:
    return f"{{{node.least},{'' if node.most is None else node.most}}}"
