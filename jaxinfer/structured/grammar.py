"""Grammars in llguidance's words, made of what requests ask for; what it cannot hold exactly is refused. No jax."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from jaxinfer.sampling_params import RequestError, SamplingParams

LIMITS = LLParserLimits(verbose_errors=False)  # whose message would repeat the grammar
_MAX_SENTENCE = 500
_PLACE, _LISTING = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?"), re.compile(r"\n\s*1 \| ")
_EXTENSION = "x-guidance"
"""A schema's key for options of the library's, such as to pass over keywords that it does not know: ours, not the
client's."""
_HEADER = '%llguidance {"no_forcing": true}\n'
"""Where one text alone can follow, any tokens that spell it may: the library would choose some for the model."""
_OPTIONS = {  # none is weaker than the schema; compact, as models that are trained on JSON write it
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
}


class GrammarError(ValueError):
    """A grammar that cannot be held. The message says why, and names the keyword where it is one."""


def compiled(kind: str, text: str, tokenizer: LLTokenizer | None = None) -> str:
    """The grammar for `llguidance.LLMatcher`, checked.

    Args:
        kind, text: of `StructuredOutputs.asked`.
        tokenizer: whose special tokens it may name; None: any.

    Raises:
        GrammarError: it is no such thing, or the library cannot hold it exactly.
    """
    try:
        grammar = _MAKE[kind](text)
    except Exception as error:  # what the converter of GBNF raises has no class of its own
        raise GrammarError(short(str(error))) from error
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer, limits=LIMITS)
    if failed or (messages and kind == "json"):  # what it warns of is a keyword that it would pass over
        raise GrammarError(short("; ".join(messages)))
    return grammar


def require_compiled(params: SamplingParams) -> None:
    """Compile what constrains a request, if anything does, in this process.

    Raises:
        RequestError: it cannot be held exactly.
    """
    if params.grammar is not None:
        try:
            compiled(*params.grammar)
        except GrammarError as error:
            raise RequestError(f"structured_outputs.{params.grammar[0]}", f"cannot be held: {error}") from error


def _json(text: str) -> str:
    schema = json.loads(text)
    if not isinstance(schema, Mapping):
        raise ValueError("a JSON Schema is an object")
    return _lark(f"start: %json {json.dumps({**schema, _EXTENSION: _OPTIONS})}")


def _lark(text: str) -> str:
    return LLMatcher.grammar_from_lark(_HEADER + text)


def _regex(text: str) -> str:
    (grammar,) = json.loads(LLMatcher.grammar_from_regex(text))["grammars"]
    return _lark(grammar["lark_grammar"])


def _json_object(text: str) -> str:
    return _json('{"type": "object"}')


def _choice(text: str) -> str:
    choices = "|".join(map(_literal, json.loads(text)))
    return _regex(f"(?:{choices})")


def _literal(choice: str) -> str:
    """A regular expression of this text alone."""
    return "".join(each if each.isalnum() and each.isascii() else f"\\x{{{ord(each):x}}}" for each in choice)


def _grammar(text: str) -> str:
    """Lark, or GBNF, whose rules are defined by ``::=``."""
    for option in (_EXTENSION, "%llguidance"):
        if option in text:
            raise ValueError(f"{option} is not served")
    return _lark(gbnf_to_lark(text) if "::=" in text else text)


_MAKE = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}


def short(message: str) -> str:
    """What the library says, without where in our text, and our text."""
    said = _PLACE.sub("", message)
    line = " ".join(_LISTING.split(said)[0].split())
    return line if len(line) <= _MAX_SENTENCE else f"{line[:_MAX_SENTENCE]}..."
