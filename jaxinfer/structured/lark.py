"""Building blocks of grammars in llguidance's Lark syntax. No jax."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from jaxinfer.structured.schemas import plain

EXTENSION = "x-guidance"
"""Schema key for library options, such as ignoring unknown keywords: for our use, not the client's."""
HEADER = '%llguidance {"no_forcing": true}\n'
"""Any tokens that spell a forced text are allowed: with forcing the library would choose tokens for the model."""
COMPACT: Mapping[str, Any] = {  # each option is at least as strict as the schema
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
}
SPACED = {**COMPACT, "item_separator": ", ?", "key_separator": ": ?"}
"""Separators as templates write the arguments of calls, or compact."""


def schema(found: Mapping[str, Any] | bool, options: Mapping[str, Any], place: str = "") -> str:
    """Return the body of a rule for JSON of a schema.

    Raises:
        GrammarError: it cannot be enforced. ``place``: the field of the request for the message.
    """
    found = plain(found, place)
    if isinstance(found, bool):
        found = {} if found else {"not": {}}
    return f"%json {json.dumps({**found, EXTENSION: options})}"


def grammar(text: str) -> str:
    """Return a client's grammar in Lark; GBNF, whose rules are defined by ``::=``, is converted.

    Raises:
        ValueError: it sets library options.
    """
    for option in (EXTENSION, "%llguidance"):
        if option in text:
            raise ValueError(f"{option} is not served")
    return gbnf_to_lark(text) if "::=" in text else text


def regex(pattern: str) -> str:
    """Return a regular expression as a terminal."""
    (made,) = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
    return str(made["lark_grammar"]).removeprefix("start: ").strip()


def literal(text: str) -> str:
    """Return a regular expression that matches only this text."""
    return "".join(each if each.isalnum() and each.isascii() else f"\\x{{{ord(each):x}}}" for each in text)


def text_without(texts: Iterable[str]) -> str:
    """Return a terminal for any text that contains none of these."""
    none = "|".join(map(literal, texts))
    return f"/(?s:.*)/ & ~/(?s:.*)(?:{none})(?s:.*)/" if none else "/(?s:.*)/"
