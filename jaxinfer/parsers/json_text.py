"""Streaming reader and repairer of the JSON that models write.

Valid JSON is copied character by character. These errors are repaired: single quotes, Python words, unquoted keys and
values, too many or too few commas and brackets, duplicate keys (the first one counts), line breaks and quotes within
strings, unpaired surrogates. So arguments are valid JSON however a model ends them, unless they are cut.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence

from jaxinfer.parsers.source import Markers, Sink, Source, Wait, ignore

_NOT_SPACE = re.compile(r"[^ \t\r\n]")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {
    "true": "true",
    "false": "false",
    **dict.fromkeys(("null", "none", "nan", "infinity", "-infinity", "undefined"), "null"),
}
"""JSON of words by their lower-case spelling."""
_OPENERS = {"{": "{", "[": "[", "(": "["}
_CLOSERS = {"}": "{", "]": "[", ")": "["}
_CLOSED_BY = {"{": "}", "[": "]"}
_FENCE = "```"
_ESCAPES = frozenset('"\\/bfnrt')
_BEHIND_STRING = frozenset(",;:=}])\"'`")
_ESCAPED = re.compile(r"\\u[0-9a-fA-F]{4}")
_HIGH, _LOW = (re.compile(rf"\\u[dD][{digits}][0-9a-fA-F]{{2}}") for digits in ("89abAB", "c-fC-F"))
_SURROGATE = re.compile("[\ud800-\udfff]")


def whole_text(text: str) -> str:
    """Return ``text`` with U+FFFD in place of unpaired surrogates, which cannot be encoded in UTF-8."""
    return _SURROGATE.sub("\ufffd", text)


def as_json(text: str) -> str:
    """Return JSON of a whole value, see `JsonReader`; "" if there is none."""
    source, parts = Source(), list[str]()
    source.add(text)
    source.end()
    for _ in JsonReader(source, parts.append).read():
        pass
    return "".join(parts)


@dataclasses.dataclass(slots=True)
class _Open:
    """An open bracket. ``filled``: it has elements; ``keys``: keys of its members."""

    bracket: str
    filled: bool = False
    keys: set[str] = dataclasses.field(default_factory=set)


class JsonReader:
    """Reader of one value.

    Args:
        sink: receives JSON.
        stops: markers that end the value early, and stay unread.
        again: if ``stops`` are text rather than special tokens, the markers that begin the next call: a stop in a
            string ends it only if one of these or the end follows. None: stops always end strings.
    """

    def __init__(self, source: Source, sink: Sink, stops: Sequence[str] = (), again: Markers | None = None) -> None:
        self._source, self._sink, self._stops, self._again = source, sink, stops, again
        self._first = frozenset(stop[0] for stop in stops)
        first = "".join(map(re.escape, self._first))
        self._in_string = {quote: re.compile(rf'["{quote}\\\x00-\x1f{first}]') for quote in "\"'"}
        self._word_end, self._bare_end = re.compile(rf"[\s,:)\]}}\[{{\"'{first}]"), re.compile(rf"[,\]}}\n{first}]")
        self._key_end = re.compile(rf"[:=,}}\]\n{first}]")
        self._open: list[_Open] = []
        self._gap: list[str] = []
        self._owed = False  # a value is expected after a colon
        self._muted = 0  # depth of a member that is dropped

    def read(self) -> Wait[bool]:
        """Read the value; an object serialised as a JSON string is unwrapped. Return whether it was complete."""
        if (yield from self._source.peek(1)) in ("'", '"'):
            return (yield from self._unwrapped())
        yield from self._value()
        return (yield from self._rest())

    def read_on(self) -> Wait[bool]:
        """Read the rest of an object after its opening brace and first member."""
        self._open = [_Open("{", filled=True)]
        return (yield from self._rest())

    def _rest(self) -> Wait[bool]:
        while self._open:
            character = yield from self._next()
            if not character or (yield from self._stopped(_FENCE)):
                self._end(cut=not character and self._source.cut)
                return False
            if character in _CLOSERS:
                self._close(_CLOSERS[self._source.take(1)])
            elif self._owed or self._open[-1].bracket == "[":
                yield from self._value()
            else:
                yield from self._member()
        return True

    def key(self) -> Wait[str | None]:
        """Read a key or another short text. None: there is none."""
        text = yield from self._key()
        return json.loads(text) if text else None

    # ---- structure

    def _next(self) -> Wait[str]:
        """Skip whitespace and commas, and return the next character, unread. "": end of text."""
        while True:
            character = yield from self._source.scan(_NOT_SPACE, self._gap.append)
            if character not in (",", ";"):
                return character
            self._source.take(1)
            self._settle()
            self._gap.append(",")

    def _settle(self) -> None:
        """Write null for a missing value."""
        if self._owed:
            self._begin("null")

    def _begin(self, text: str) -> None:
        """Write a key, a scalar or an opening bracket, after a comma if one is needed."""
        gap = "".join(self._gap)
        first = self._owed or not self._open or not self._open[-1].filled
        before, comma, behind = gap.partition(",")
        if first:
            gap = gap.replace(",", "")
        else:
            gap = f"{before},{behind.replace(',', '')}" if comma else f",{gap or ' '}"
        if self._open:
            self._open[-1].filled = True
        self._gap, self._owed = [], False
        self._emit(gap + text)

    def _close(self, bracket: str) -> None:
        """Close the innermost of these brackets, and those within it; drop an unmatched closing bracket."""
        if any(each.bracket == bracket for each in self._open):
            while self._pop() != bracket:
                pass

    def _pop(self) -> str:
        self._settle()
        if self._muted == len(self._open):
            self._muted = 0
        bracket, gap = self._open.pop().bracket, "".join(self._gap).replace(",", "")
        self._gap = []
        self._emit(gap + _CLOSED_BY[bracket])
        return bracket

    def _end(self, *, cut: bool) -> None:
        """Close open brackets, unless the text is ``cut``: then the JSON stays incomplete."""
        self._gap = []
        while self._open and not cut:
            self._pop()

    def _emit(self, text: str) -> None:
        if not self._muted and text:
            self._sink(text)

    def _member(self) -> Wait[None]:
        """Read a key and its colon."""
        before, self._gap = self._gap, []
        key = yield from self._key()
        following = yield from self._source.scan(_NOT_SPACE, self._gap.append)
        between, self._gap = "".join(self._gap), before
        if not key or not following:  # half a key, or none
            return
        if following in ":=":
            self._source.take(1)
            yield from self._source.starts(">")
        if self._muted == len(self._open):
            self._muted = 0
        name, known = json.loads(key), self._open[-1].keys
        if name in known and not self._muted:
            self._muted = len(self._open)
        known.add(name)
        self._begin(f"{key}{between}:")
        self._owed = True

    def _key(self) -> Wait[str]:
        """Return a key as JSON; "" if there is none."""
        parts: list[str] = []
        character = yield from self._source.peek(1)
        if character in ("'", '"'):
            return "".join(parts) if (yield from self._string(parts.append)) else ""
        if character not in _OPENERS:
            yield from self._source.scan(self._key_end, parts.append)
        bare = "".join(parts).strip()
        if not parts and not (yield from self._stopped()):
            self._source.take(1)  # a character that cannot be a key
        return _quoted(bare) if bare else ""

    # ---- values

    def _value(self) -> Wait[None]:
        character = yield from self._source.peek(1)
        if character in _OPENERS:
            bracket = _OPENERS[self._source.take(1)]
            self._begin(bracket)
            self._open.append(_Open(bracket))
        elif character in ("'", '"'):
            self._begin("")
            yield from self._string(self._emit)
        else:
            yield from self._scalar()

    def _unwrapped(self) -> Wait[bool]:
        parts: list[str] = []
        whole = yield from self._string(parts.append)
        text = "".join(parts)
        if whole or not self._source.cut:
            inner = json.loads(text).strip()
            self._emit(as_json(inner) if inner[:1] in ("{", '"') else "" if inner in ("", "null") else text)
        return whole

    def _scalar(self) -> Wait[None]:
        """Read a number or a word; anything else is an unquoted string."""
        parts: list[str] = []
        end = self._word_end
        while character := (yield from self._source.scan(end, parts.append)):
            bare = _scalar("".join(parts)) is None and character not in ",]}"
            if (yield from self._stopped()) or not (bare or character in self._first):
                break
            if bare and parts:
                end = self._bare_end
            elif not parts and self._open:  # a colon
                self._source.take(1)
                return
            parts.append(self._source.take(1))
        word = "".join(parts)
        if not self._open and word in ("", "null"):
            return
        if not character and self._source.cut:
            self._begin(word)
        elif word:
            self._begin(_scalar(word) or _quoted(word.strip()))

    def _string(self, sink: Sink) -> Wait[bool]:
        """Read a string. False: it is unterminated."""
        quote = self._source.take(1)
        sink('"')
        while character := (yield from self._source.scan(self._in_string[quote], lambda text: sink(whole_text(text)))):
            if character == "\\":
                yield from self._escape(sink)
            elif character == quote:
                self._source.take(1)
                if (yield from self._source.look(self._ends_string())):
                    sink('"')
                    return True
                sink(_inner(quote))
            elif character in self._first and (yield from self._stops_string()):
                break
            else:
                sink(_inner(self._source.take(1)))
        if character or not self._source.cut:
            sink('"')
        return False

    def _ends_string(self) -> Wait[bool]:
        """Return whether the preceding quote ends its string, judged by the character after it."""
        character = yield from self._source.scan(_NOT_SPACE, ignore)
        return not character or character in _BEHIND_STRING or (yield from self._stopped())

    def _escape(self, sink: Sink) -> Wait[None]:
        pair = yield from self._source.peek(2)
        if pair[1:] == "u":
            yield from self._unicode(sink)
        elif pair[1:] in _ESCAPES:
            sink(self._source.take(2))
        elif pair[1:] in ("'", "\n", ""):
            sink(_inner(self._source.take(len(pair))[1:]))
        else:
            self._source.take(1)
            sink("\\\\")

    def _unicode(self, sink: Sink) -> Wait[None]:
        escape = yield from self._source.peek(6)
        if len(escape) < 6 and self._source.cut:
            self._source.take(len(escape))
        elif not _ESCAPED.fullmatch(escape):
            self._source.take(1)
            sink("\\\\")
        elif _HIGH.fullmatch(escape) and _LOW.fullmatch((yield from self._source.peek(12))[6:]):
            sink(self._source.take(12))
        else:
            self._source.take(6)
            sink("\\ufffd" if _HIGH.fullmatch(escape) or _LOW.fullmatch(escape) else escape)

    # ---- stops

    def _stopped(self, *others: str) -> Wait[bool]:
        """Return whether a stop comes next, or one of ``others``."""
        for stop in (*self._stops, *others):
            if (yield from self._source.ahead(stop)):
                return True
        return False

    def _stops_string(self) -> Wait[bool]:
        if not (yield from self._stopped()):
            return False
        return self._again is None or (yield from self._source.look(self._over(self._again)))

    def _over(self, again: Markers) -> Wait[bool]:
        """Return whether the call is over after a stop."""
        for stop in self._stops:
            if (yield from self._source.starts(stop)):
                break
        return (yield from self._source.ended()) or bool((yield from self._source.which(again)))


def _scalar(word: str) -> str | None:
    """Return JSON of a number or a word; None for text."""
    return word if _NUMBER.fullmatch(word) else _WORDS.get(word.lower())


def _inner(text: str) -> str:
    return _quoted(text)[1:-1]


def _quoted(text: str) -> str:
    return json.dumps(whole_text(text), ensure_ascii=False)
