"""Pieces of llguidance's Lark notation, which all grammars are made of here. No jax."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from jaxinfer.structured.schemas import plain

EXTENSION = "x-guidance"
"""A schema's key for options of the library's, such as to pass over keywords that it does not know: ours, not the
client's."""
HEADER = '%llguidance {"no_forcing": true}\n'
"""Where one text alone can follow, any tokens that spell it may: the library would choose some for the model."""
COMPACT: Mapping[str, Any] = {  # none is weaker than the schema
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
}
SPACED = {**COMPACT, "item_separator": ", ?", "key_separator": ": ?"}
"""As templates write the arguments of calls, or compact."""


def schema(found: Mapping[str, Any] | bool, options: Mapping[str, Any], place: str = "") -> str:
    """What a rule is that holds JSON of a schema.

    Raises:
        GrammarError: it cannot be held. ``place``: of the request, that it is about.
    """
    found = plain(found, place)
    if isinstance(found, bool):
        found = {} if found else {"not": {}}
    return f"%json {json.dumps({**found, EXTENSION: options})}"


def grammar(text: str) -> str:
    """A client's grammar in Lark, or in GBNF, whose rules are defined by ``::=``.

    Raises:
        ValueError: it sets options of the library's.
    """
    for option in (EXTENSION, "%llguidance"):
        if option in text:
            raise ValueError(f"{option} is not served")
    return gbnf_to_lark(text) if "::=" in text else text


def regex(pattern: str) -> str:
    """A regular expression as a terminal."""
    (made,) = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
    return str(made["lark_grammar"]).removeprefix("start: ").strip()


def literal(text: str) -> str:
    """A regular expression of this text alone."""
    return "".join(each if each.isalnum() and each.isascii() else f"\\x{{{ord(each):x}}}" for each in text)


def text_without(texts: Iterable[str]) -> str:
    """A terminal of any text in which none of these stands."""
    none = "|".join(map(literal, texts))
    return f"/(?s:.*)/ & ~/(?s:.*)(?:{none})(?s:.*)/" if none else "/(?s:.*)/"
