"""Compilation of request constraints to llguidance grammars; rejects those that cannot be enforced exactly. No jax."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.structured import lark
from jaxinfer.structured.schemas import GrammarError
from jaxinfer.structured.tags import Held, held

LIMITS = LLParserLimits(verbose_errors=False)  # verbose errors would repeat the grammar
TAGS = "structural_tag"
_MAX_SENTENCE = 500
_PLACE, _LISTING = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?"), re.compile(r"\n\s*1 \| ")


def compiled(
    kind: str, text: str, tokenizer: LLTokenizer | None = None, special: Mapping[str, int] | None = None
) -> str:
    """Return the grammar for `llguidance.LLMatcher`, checked.

    Args:
        kind, text: from `StructuredOutputs.asked`.
        tokenizer: defines the special tokens that the grammar may name; None: any.
        special: special tokens by the texts with which structural tags spell them; None: there are none.

    Raises:
        GrammarError: the text is invalid, or the library cannot enforce it exactly.
    """
    try:
        found = held(text, special or {}) if kind == TAGS else None
        grammar = _MAKE[kind](text) if found is None else json.dumps({"grammars": found.grammars})
    except GrammarError:
        raise
    except Exception as error:  # the GBNF converter raises plain Exception
        raise GrammarError(short(str(error))) from error
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer, limits=LIMITS)
    if found is not None and messages:
        _check_schemas(found)
    if failed or (messages and kind == "json"):  # the library warns of keywords that it would ignore
        raise GrammarError(short("; ".join(messages)))
    return grammar


def _check_schemas(found: Held) -> None:
    """Raise an error that names the schema with which a structural tag's grammar fails, if it is one."""
    for place, rule in found.schemas:
        _, messages = LLMatcher.validate_grammar_with_warnings(_lark(f"start: {rule}"), limits=LIMITS)
        if messages:
            raise GrammarError(short("; ".join(messages)), place)


def require_compiled(params: SamplingParams) -> None:
    """Compile the constraint of a request, if there is one, in this process.

    Raises:
        RequestError: it cannot be enforced exactly.
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
    """Shorten a library message: remove positions in, and quotes of, our generated grammar."""
    said = _PLACE.sub("", message)
    line = " ".join(_LISTING.split(said)[0].split())
    return line if len(line) <= _MAX_SENTENCE else f"{line[:_MAX_SENTENCE]}..."
