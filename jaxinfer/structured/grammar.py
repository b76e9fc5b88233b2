"""Grammars in llguidance's words, made of what requests ask for; what it cannot hold exactly is refused. No jax."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.structured import lark
from jaxinfer.structured.schemas import GrammarError
from jaxinfer.structured.tags import Held, held

LIMITS = LLParserLimits(verbose_errors=False)  # whose message would repeat the grammar
TAGS = "structural_tag"
_MAX_SENTENCE = 500
_PLACE, _LISTING = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?"), re.compile(r"\n\s*1 \| ")


def compiled(
    kind: str, text: str, tokenizer: LLTokenizer | None = None, special: Mapping[str, int] | None = None
) -> str:
    """The grammar for `llguidance.LLMatcher`, checked.

    Args:
        kind, text: of `StructuredOutputs.asked`.
        tokenizer: whose special tokens it may name; None: any.
        special: special tokens by the texts that structural tags spell; None: there are none.

    Raises:
        GrammarError: it is no such thing, or the library cannot hold it exactly.
    """
    try:
        found = held(text, special or {}) if kind == TAGS else None
        grammar = _MAKE[kind](text) if found is None else json.dumps({"grammars": found.grammars})
    except GrammarError:
        raise
    except Exception as error:  # what the converter of GBNF raises has no class of its own
        raise GrammarError(short(str(error))) from error
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer, limits=LIMITS)
    if found is not None and messages:
        _check_schemas(found)
    if failed or (messages and kind == "json"):  # what it warns of is a keyword that it would pass over
        raise GrammarError(short("; ".join(messages)))
    return grammar


def _check_schemas(found: Held) -> None:
    """Name the schema that a structural tag's grammar fails with, if it is one."""
    for place, rule in found.schemas:
        _, messages = LLMatcher.validate_grammar_with_warnings(_lark(f"start: {rule}"), limits=LIMITS)
        if messages:
            raise GrammarError(short("; ".join(messages)), place)


def require_compiled(params: SamplingParams) -> None:
    """Compile what constrains a request, if anything does, in this process.

    Raises:
        RequestError: it cannot be held exactly.
    """
    if params.grammar is not None:
        try:
            compiled(*params.grammar)
        except GrammarError as error:
            place = error.place or f"structured_outputs.{params.grammar[0]}"
            raise RequestError(place, f"cannot be held: {error}") from error


def _json(text: str) -> str:
    schema = json.loads(text)
    if not isinstance(schema, Mapping):
        raise ValueError("a JSON Schema is an object")
    return _lark(f"start: {lark.schema(schema, lark.COMPACT)}")


def _lark(text: str) -> str:
    return LLMatcher.grammar_from_lark(lark.HEADER + text)


def _regex(text: str) -> str:
    return _lark(f"start: {lark.regex(text)}")


def _json_object(text: str) -> str:
    return _json('{"type": "object"}')


def _choice(text: str) -> str:
    choices = "|".join(map(lark.literal, json.loads(text)))
    return _regex(f"(?:{choices})")


def _grammar(text: str) -> str:
    return _lark(lark.grammar(text))


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
