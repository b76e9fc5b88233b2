"""Token decoding: the bytes of a token, and conversion of a byte stream to text.

Every decoder of causal language models is a concatenation: the bytes of a token depend only on the token and whether it
is the first. With those bytes incremental detokenising is exact at a constant cost per token, which re-decoding a
window of tokens is not.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer as Library

REPLACEMENT = "\ufffd"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")
_PER_TOKEN_DECODERS = frozenset({"Metaspace", "Replace", "ByteFallback", "Strip", "WordPiece", "Fuse"})
_PROBE = "a"


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded or cannot serve the call, with a one-sentence message."""


@dataclasses.dataclass(frozen=True)
class DecodeRule:
    """Rule that converts token strings to text.

    Attributes:
        piece: ``piece(token, first)`` gives the bytes of a token; ``first`` is true for the first token of a text.
        errors: handling of ill-formed UTF-8: "replace" gives U+FFFD for each maximal ill-formed part (byte-level
            vocabularies), "surrogateescape" U+FFFD for each byte (byte-fallback vocabularies).
        strip: characters removed from the start of a text, each at most once and in order, as long as they match.
    """

    piece: Callable[[str, bool], bytes]
    errors: str = "replace"
    strip: str = ""


class TextStream:
    """Incremental UTF-8 decoder under a :class:`DecodeRule`. A character is emitted once it is complete."""

    def __init__(self, rule: DecodeRule, at_start: bool = True) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(rule.errors)
        self._errors = rule.errors
        self._strip = rule.strip if at_start else ""

    def feed(self, data: bytes, final: bool = False) -> str:
        """Return the text that ``data`` completes; with ``final`` an incomplete character becomes U+FFFD."""
        text = self._replaced(self._decoder.decode(data, final))
        return self._stripped(text) if self._strip and text else text

    def pending(self) -> str:
        """Return the text that ``feed(b"", final=True)`` would return now, without ending the stream."""
        # Not always one U+FFFD: half a surrogate (ED A0), which nothing can complete, is kept back, and becomes two.
        return self._replaced(self._decoder.getstate()[0].decode(errors=self._errors))

    def _replaced(self, text: str) -> str:
        return _ESCAPED_BYTE.sub(REPLACEMENT, text) if self._errors == "surrogateescape" else text

    def _stripped(self, text: str) -> str:
        while text and self._strip and text[0] == self._strip[0]:
            text, self._strip = text[1:], self._strip[1:]
        if text:
            self._strip = ""
        return text


def library_rule(library: Library) -> DecodeRule:
    """Return the rule of a tokenizers-library decoder.

    ByteLevel uses GPT-2's table. For decoders that work token by token, the library decodes each token after another
    one; byte tokens (``<0x0A>``) are the byte that they name.

    Raises:
        TokenizerError: a kind or a combination of decoders that is not a concatenation of tokens (CTC, BPEDecoder).
    """
    if library.decoder is None:
        return DecodeRule(_spaced)
    parts = _flatten(json.loads(library.decoder.__getstate__()))
    kinds = [part["type"] for part in parts]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return DecodeRule(_byte_level)
    unknown = set(kinds) - _PER_TOKEN_DECODERS
    if unknown:
        raise TokenizerError(f"the tokenizer's decoder {' + '.join(kinds)} is not supported: {sorted(unknown)}")
    strip = _strip_after_fuse(parts)
    if strip and {"Metaspace", "WordPiece"} & set(kinds):
        raise TokenizerError(f"the tokenizer's decoder {' + '.join(kinds)} treats the first token twice: not supported")
    has_bytes = "ByteFallback" in kinds
    piece = _probed(library.decoder.decode, has_bytes, first_differs=not strip)
    return DecodeRule(piece, "surrogateescape" if has_bytes else "replace", strip)


def byte_of(token: str) -> bytes | None:
    """Return the byte that a byte-fallback token such as ``<0x0A>`` names, or None for another token."""
    found = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(found[1], 16)]) if found else None


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [part for inner in decoder["decoders"] for part in _flatten(inner)]


def _strip_after_fuse(parts: list[dict[str, Any]]) -> str:
    """Return the characters that decoders after Fuse, which see the whole text, remove from its start."""
    kinds = [part["type"] for part in parts]
    whole = parts[kinds.index("Fuse") + 1 :] if "Fuse" in kinds else []
    strip = ""
    for part in whole:
        if part["type"] == "Strip" and part["stop"] == 0 and part["content"] != _PROBE:
            strip += part["content"] * part["start"]
        elif part["type"] != "Fuse":
            raise TokenizerError(f"the tokenizer's decoder applies {part['type']} to the whole text: not supported")
    return strip


def _probed(decode: Callable[[list[str]], str], has_bytes: bool, first_differs: bool) -> Callable[[str, bool], bytes]:
    """Return a rule that calls the library; a probe token before the token gives its bytes within a text."""
    offset = len(decode([_PROBE]))

    def piece(token: str, first: bool) -> bytes:
        byte = byte_of(token) if has_bytes else None
        if byte is not None:
            return byte
        return (decode([token]) if first and first_differs else decode([_PROBE, token])[offset:]).encode()

    return piece


def _spaced(token: str, first: bool) -> bytes:
    """Decode without a decoder: the library joins tokens by spaces."""
    return (token if first else " " + token).encode()


def _byte_level(token: str, first: bool) -> bytes:
    """Decode by GPT-2's byte table; a token with a character outside the table (an added one) is its own UTF-8."""
    del first
    try:
        return bytes(map(_BYTE_OF_CHAR.__getitem__, token))
    except KeyError:
        return token.encode()


def _byte_chars() -> dict[str, int]:
    """Return GPT-2's table (``bytes_to_unicode`` in encoder.py): printable bytes unchanged, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_chars()
