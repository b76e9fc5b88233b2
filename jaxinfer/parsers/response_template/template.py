"""Response templates in transformers' tokenizer_config.json format: validation and compilation."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxinfer.parsers.pattern import PatternError, literals
from jaxinfer.parsers.response_template.contents import TEXT, Contents, read_contents, read_program
from jaxinfer.parsers.response_template.errors import refuse, require
from jaxinfer.parsers.response_template.program import Program, compiled
from jaxinfer.parsers.response_template.search import find_all

MOST_BYTES = 1 << 16
"""Maximum bytes of a template's JSON."""
MOST_FIELDS = 16
_KEY = "response_template"
_DEFAULTS = ("role", "content", "reasoning", "reasoning_content", "thinking", "tool_calls")
_TEMPLATE_KEYS = ("version", "defaults", "fields", "start_anchor", "start_anchor_pattern")
_OPEN, _CLOSE, _ANCHOR = (f"{word}_pattern" for word in ("open", "close", "start_anchor"))
_BOOLEANS = ("repeats", "optional", "transform_each")
_FIELD_KEYS = ("open", _OPEN, "close", _CLOSE, "content", "content_args", "transform", "join", *_BOOLEANS)
_TEXT_END = ("$", r"\Z")  # matches at the end of every region anyway
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")


class Kind(enum.Enum):
    """Output field for the text of a template field."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALLS = "tool_calls"


FIELDS: Mapping[str, Kind] = {
    "content": Kind.CONTENT,
    "reasoning": Kind.REASONING,
    "reasoning_content": Kind.REASONING,
    "thinking": Kind.REASONING,
    "tool_calls": Kind.CALLS,
}


@dataclasses.dataclass(frozen=True)
class Field:
    """A region of an answer.

    Attributes:
        open, close: begin and end delimiters. None: it begins where no other region is open; it ends with the text.
        strip: whitespace around its text is dropped.
        join: separator of its texts; None: a line break.
        transform: the shape of its calls, with placeholders.
        each: the shape applies to each item of the content.
    """

    name: str
    kind: Kind
    contents: Contents
    open: Program | None = None
    close: Program | None = None
    strip: bool = True
    join: str | None = None
    transform: Any = None
    each: bool = False


@dataclasses.dataclass(frozen=True)
class ResponseTemplate:
    """Compiled response template of a checkpoint, see `read_template`.

    Attributes:
        fields: fields with a begin delimiter.
        implicit: field that is open where no other is; None: text there is dropped.
        anchor: pattern that begins an answer within a prompt.
        markers: special tokens that it uses: the detokenizer must keep them.
    """

    fields: Sequence[Field]
    implicit: Field | None
    anchor: Program
    markers: frozenset[str]

    def begun(self, prompt: str) -> str:
        """Return the beginning of the answer that is at the end of the prompt."""
        found = find_all(self.anchor, prompt)
        return prompt[found[-1].end :] if found else ""


def read_template(raw: object, special: Collection[str] = ()) -> ResponseTemplate:
    """Make a template from tokenizer_config.json.

    Args:
        special: texts of the tokenizer's special tokens.

    Raises:
        ResponseTemplateError: it is invalid, too large, or has unsupported keys: names the key and the value.
    """
    if not isinstance(raw, Mapping):
        refuse(_KEY, raw, "must be an object")
    size = len(json.dumps(raw, ensure_ascii=False).encode(errors="surrogatepass"))
    require(size <= MOST_BYTES, _KEY, raw, f"has {size} bytes; at most {MOST_BYTES} are read")
    _only(_KEY, raw, _TEMPLATE_KEYS)
    require(raw.get("version", 1) == 1, f"{_KEY}.version", raw.get("version"), "must be 1")
    _check_defaults(raw.get("defaults", {}))
    fields = _fields(raw.get("fields"))
    anchor = _anchor(_KEY, raw, "start_anchor", _ANCHOR)
    require(anchor is not None, f"{_KEY}.start_anchor", None, "must be there, or start_anchor_pattern")
    assert anchor is not None
    return _made(fields, anchor, special)


def _made(fields: Sequence[Field], anchor: Program, special: Collection[str]) -> ResponseTemplate:
    implicit = [field for field in fields if field.open is None]
    what = "have nothing that begins them; one may"
    require(len(implicit) <= 1, f"{_KEY}.fields", [field.name for field in implicit], what)
    if not implicit and all(field.kind != Kind.CONTENT for field in fields):
        implicit = [Field("content", Kind.CONTENT, read_contents(_KEY, TEXT, {}))]  # no text is dropped
    texts = [text for field in fields for text in _texts(field)]
    markers = frozenset(token for token in special if any(token in text for text in texts))
    return ResponseTemplate(
        [field for field in fields if field.open], implicit[0] if implicit else None, anchor, markers
    )


def _texts(field: Field) -> Sequence[str]:
    """Return the literal texts that a field searches for."""
    programs = (field.open, field.close, field.contents.tags)
    return [text for program in programs if program for text in program.runs] + list(field.contents.literals)


def _only(key: str, found: Mapping[str, Any], known: Sequence[str]) -> None:
    for word, value in found.items():
        require(word in known, f"{key}.{word}", value, f"is not understood: known are {', '.join(known)}")


def _check_defaults(defaults: object) -> None:
    """Check the constant fields of a message: its role, and fields that are empty."""
    if not isinstance(defaults, Mapping):
        refuse(f"{_KEY}.defaults", defaults, "must be an object")
    _only(f"{_KEY}.defaults", defaults, _DEFAULTS)
    for word, value in defaults.items():
        require(word == "role" or not value, f"{_KEY}.defaults.{word}", value, "must be empty")


def _fields(raw: object) -> Sequence[Field]:
    if not isinstance(raw, Mapping) or not raw:
        refuse(f"{_KEY}.fields", raw, "must be an object with fields")
    require(len(raw) <= MOST_FIELDS, f"{_KEY}.fields", list(raw), f"must be at most {MOST_FIELDS}")
    return [_field(f"{_KEY}.fields.{name}", name, field) for name, field in raw.items()]


def _field(key: str, name: str, raw: object) -> Field:
    require(name in FIELDS, key, raw, f"is not understood: fields may be {', '.join(FIELDS)}")
    if not isinstance(raw, Mapping):
        refuse(key, raw, "must be an object")
    _only(key, raw, _FIELD_KEYS)
    for word in _BOOLEANS:
        require(isinstance(raw.get(word, False), bool), f"{key}.{word}", raw.get(word), "must be true or false")
    return _checked(key, name, raw)


def _checked(key: str, name: str, raw: Mapping[str, Any]) -> Field:
    begin = _anchor(key, raw, "open", _OPEN)
    end = None if raw.get(_CLOSE) in _TEXT_END else _anchor(key, raw, "close", _CLOSE)
    kind, arguments = FIELDS[name], raw.get("content_args", {})
    contents = read_contents(key, raw.get("content", TEXT), arguments)
    kept = [part for program in (begin, end) if program is not None for part in program.names]
    (_check_calls if kind == Kind.CALLS else _check_text)(key, raw, kept)
    shape, each = raw.get("transform"), raw.get("transform_each", False)
    return Field(name, kind, contents, begin, end, arguments.get("strip", True), raw.get("join"), shape, each)


def _anchor(key: str, raw: Mapping[str, Any], literal: str, pattern: str) -> Program | None:
    """Compile a delimiter: one text, several texts, or a pattern."""
    both = literal in raw and pattern in raw
    require(not both, f"{key}.{literal}", raw.get(literal), f"and {pattern} cannot be there at once")
    if pattern in raw:
        return read_program(f"{key}.{pattern}", raw[pattern], anywhere=literal != "open")
    return _literal(f"{key}.{literal}", raw[literal]) if literal in raw else None


def _literal(key: str, raw: object) -> Program:
    texts = raw if isinstance(raw, list) else [raw]
    good = bool(texts) and all(isinstance(text, str) and text for text in texts)
    require(good, key, raw, "must be a text, or a list of texts")
    try:
        return compiled(literals(*texts))
    except PatternError as error:
        refuse(key, raw, str(error))


def _check_text(key: str, raw: Mapping[str, Any], kept: Sequence[str]) -> None:
    """Reject options under which a content or reasoning field would not be text."""
    require(raw.get("content", TEXT) == TEXT, f"{key}.content", raw.get("content"), "must be text in this field")
    for word in ("transform", "transform_each"):
        require(not raw.get(word), f"{key}.{word}", raw.get(word), "is for tool_calls alone")
    join = raw.get("join")
    require(join is None or isinstance(join, str), f"{key}.join", join, "must be a text")
    require(join is None or raw.get("repeats", False), f"{key}.join", join, "needs repeats")
    require(not kept, f"{key}.{_OPEN}", raw.get(_OPEN), "names parts, which only a transform could use")


def _check_calls(key: str, raw: Mapping[str, Any], kept: Sequence[str]) -> None:
    require("join" not in raw, f"{key}.join", raw.get("join"), "is for text alone")
    shape, each = raw.get("transform"), raw.get("transform_each", False)
    require(shape is not None or not each, f"{key}.transform_each", each, "needs a transform")
    require(shape is not None or not kept, f"{key}.transform", shape, f"must be there, to use {', '.join(kept)}")
    _check_shape(f"{key}.transform", shape, None if each else {*kept, "content"})


def _check_shape(key: str, shape: Any, known: Collection[str] | None) -> None:
    """Check the placeholders. ``known``: names that they may use; None: also fields of an item."""
    if isinstance(shape, Mapping | list):
        for inner in shape.values() if isinstance(shape, Mapping) else shape:
            _check_shape(key, inner, known)
    elif isinstance(shape, str) and _PLACEHOLDER.search(shape):
        match = _PLACEHOLDER.fullmatch(shape)
        if match is None:
            refuse(key, shape, "mixes a placeholder with text")
        root = match[1].partition(".")[0]
        require(known is None or root in known, key, shape, f"names none of {', '.join(sorted(known or ()))}")


def shaped(shape: Any, scope: Mapping[str, Any]) -> Any:
    """Return a transform with its placeholders replaced by values.

    Raises:
        ValueError: a value is missing.
    """
    if isinstance(shape, Mapping):
        return {key: shaped(inner, scope) for key, inner in shape.items()}
    if isinstance(shape, list):
        return [shaped(inner, scope) for inner in shape]
    match = _PLACEHOLDER.fullmatch(shape) if isinstance(shape, str) else None
    value: Any = shape if match is None else scope
    for key in match[1].split(".") if match else ():
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"nothing is at {shape}")
        value = value[key]
    return value
