"""Structural tags as grammars in llguidance's notation. No jax.

Free text is one lexeme, up to the text that ends it: the library's lexer is greedy, so a lexeme of that kind is lazy, and
what ends it is a part of it. A special token ends a lexeme by itself.
"""

from __future__ import annotations

import itertools
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


class Held(NamedTuple):
    """A structural tag's grammar.

    Attributes:
        grammars: as llguidance takes several.
        schemas: of JSON in it, each with its place and a rule that holds it.
    """

    grammars: Sequence[Mapping[str, Any]]
    schemas: Sequence[tuple[str, str]]


def held(text: str, special: Mapping[str, int]) -> Held:
    """The grammar of a structural tag.

    Args:
        special: special tokens by their texts. What is none is text.

    Raises:
        ValueError: it is no structural tag, naming the part.
    """
    writer = _Writer(special)
    start = writer.node(read(text))
    lines = [f"start: {start}", *(f"{name}: {body}" for name, body in writer.rules.items())]
    return Held([_grammar("tags", "\n".join(lines)), *writer.others], writer.schemas)


def _grammar(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "lark_grammar": lark.HEADER + text}


class _Writer:
    """Writer of rules. Each method returns what a rule says of a node, and of what ends it.

    Attributes:
        rules: by name. Names in capitals are lexemes.
        others: grammars besides.
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
        """``ends``: texts of which one follows, none: nothing does."""
        whole = self._lexeme([node], ends)
        if whole is not None:
            return whole
        match node:
            case AnyText():
                return self._until(node.excludes, ends)
            case Triggered():
                return self._triggered(node, ends)
            case Row():
                return self._row(node.elements, ends)
            case Tag():
                return self._tag(node, ends)
            case Either():
                return _either(self.node(each, ends) for each in node.elements)
            case Repeat() if unlimited(node.content):
                return _either([self.node(node.content, ends), self._one_of(ends) or '""'])
            case _:
                return f"{self._limited(node)} {self._one_of(ends)}"

    def _limited(self, node: Node) -> str:
        match node:
            case Json():
                return self._json(node)
            case Grammar():
                return self._other(node)
            case Repeat():
                most = "" if node.most is None else node.most
                return f"({self.node(node.content)}){{{node.least},{most}}}"
            case Const():
                return self._const(node.value)
            case _:
                raise TypeError(node)

    # ---- texts

    def _pieces(self, text: str) -> list[str | int]:
        """A text's special tokens, and the texts between them."""
        return [self._special.get(each, each) for each in self._names.split(text) if each]

    def _const(self, text: str) -> str:
        return " ".join(map(_piece, self._pieces(text))) or '""'

    def _one_of(self, texts: Sequence[str]) -> str:
        return _either(map(self._const, texts)) if texts else ""

    def _until(self, excludes: Iterable[str], ends: Sequence[str]) -> str:
        """Free text up to one of the texts, and that too."""
        without = self._rule("TEXT", lark.text_without(sorted({*excludes, *ends})))
        return _either(self._up_to(without, end) for end in ends) if ends else without

    def _up_to(self, text: str, end: str) -> str:
        first, *rest = self._pieces(end)
        if isinstance(first, int):
            return " ".join([text, *map(_piece, [first, *rest])])
        if rest:
            return " ".join([self._rule("TEXT", f"{text} {_piece(first)}"), *map(_piece, rest)])
        return self._rule("text", f"{text} {_piece(first)}", "[lazy]")

    # ---- parts

    def _lexeme(self, nodes: Sequence[Node], ends: Sequence[str] = ()) -> str | None:
        """One lexeme of parts that a regular expression tells, and of the text behind: several would not know where one
        ends. None: they are no such parts."""
        if not any(map(_has_regex, nodes)):
            return None
        parts = [self._regular(each) for each in nodes]
        if len(ends) > 1 or None in parts:
            return None
        behind = [self._regular(Const(end)) for end in ends]
        if None in behind:
            return f"{self._rule('REGEX', ' '.join(map(str, parts)))} {self._one_of(ends)}"
        return self._rule("REGEX", " ".join(map(str, [*parts, *behind])))

    def _regular(self, node: Node) -> str | None:
        match node:
            case Const():
                pieces = self._pieces(node.value)
                return None if any(isinstance(each, int) for each in pieces) else json.dumps(node.value)
            case Regex():
                without = f" & ({lark.text_without(node.excludes)})" if node.excludes else ""
                return f"({lark.regex(node.pattern)}{without})"
            case Row():
                parts = [self._regular(each) for each in node.elements]
                return None if None in parts else f"({' '.join(map(str, parts))})"
            case Either():
                parts = [self._regular(each) for each in node.elements]
                return None if None in parts else _either(map(str, parts))
            case Repeat():
                content, most = self._regular(node.content), "" if node.most is None else node.most
                return None if content is None else f"({content}){{{node.least},{most}}}"
            case _:
                return None

    def _row(self, nodes: Sequence[Node], ends: Sequence[str]) -> str:
        if not unlimited(nodes[-1]) and len(ends) <= 1:
            return self._runs([*nodes, *map(Const, ends)])
        return f"{self._runs(nodes[:-1])} {self.node(nodes[-1], ends)}"

    def _runs(self, nodes: Sequence[Node]) -> str:
        """Parts that end by themselves; neighbours that a regular expression tells are one lexeme."""
        said = []
        for regular, run in itertools.groupby(nodes, lambda each: self._regular(each) is not None):
            parts = list(run)
            whole = self._lexeme(parts) if regular else None
            said += [whole] if whole is not None else [self.node(each) for each in parts]
        return " ".join(said)

    def _tag(self, tag: Tag, ends: Sequence[str]) -> str:
        inside = Row([Const(tag.begin), tag.content])
        return f"{self._row(inside.elements, tag.ends)} {self._one_of(ends)}" if tag.ends else self.node(inside, ends)

    def _triggered(self, node: Triggered, ends: Sequence[str]) -> str:
        called, never = [], {*node.triggers, *node.excludes, *ends}
        for trigger, those in self._by_trigger(node).items():
            rest = _either(self.node(Tag(tag.begin.removeprefix(trigger), tag.content, tag.ends)) for tag in those)
            called.append(f"{self._until(never, [trigger])} {rest}")
        more, rest, end = self._rule("called", " | ".join(called)), self._until(never, ends), self._one_of(ends)
        if not node.at_least_one:
            return f"({more} {end} | {rest})" if node.stop_after_first else f"{more}* {rest}"
        first = _either(map(self.node, node.tags))
        return f"{first} {end}" if node.stop_after_first else f"{first} {more}* {rest}"

    def _by_trigger(self, node: Triggered) -> dict[str, list[Tag]]:
        """Tags by what really begins them: a trigger may be the beginning of a special token's text."""
        found: dict[str, list[Tag]] = {}
        for tag in node.tags:
            trigger = next(each for each in node.triggers if tag.begin.startswith(each))
            longer = (each for each in self._special if tag.begin.startswith(each) and each.startswith(trigger))
            found.setdefault(next(longer, trigger), []).append(tag)
        return found

    def _json(self, node: Json) -> str:
        rule = lark.schema(node.schema, lark.SPACED)
        if rule not in self._known:
            self.schemas.append((node.place, rule))
        return self._rule("json", rule)

    def _other(self, node: Grammar) -> str:
        if node.text not in self._known:
            self._known[node.text] = f"grammar{len(self.others)}"
            self.others.append(_grammar(self._known[node.text], lark.grammar(node.text)))
        return f"@{self._known[node.text]}"

    def _rule(self, name: str, body: str, options: str = "") -> str:
        """The name of a rule, made once."""
        key = options + body
        if key not in self._known:
            self._known[key] = f"{name}{len(self.rules)}"
            self.rules[self._known[key] + options] = body
        return self._known[key]


def _piece(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece)


def _either(those: Iterable[str]) -> str:
    return f"({' | '.join(those)})"


def _has_regex(node: Node) -> bool:
    match node:
        case Regex():
            return True
        case Row() | Either():
            return any(map(_has_regex, node.elements))
        case Repeat():
            return _has_regex(node.content)
        case _:
            return False
