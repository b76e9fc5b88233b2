"""Lower bound on the number of a text's tokens, without tokenising it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as Library
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

_NFC_SHRINKS = 4
"""Factor by which NFC can shorten a text, rounded up: U+03B9 U+0308 U+0341 (7 bytes) become U+0390 (2 bytes)."""
_SPLITTING = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})
_SLICE = 1 << 16


def longest(library: Library) -> int | None:
    """Return the maximum UTF-8 bytes of a text that one token can cover.

    Sound only where every byte of a text is in a token: that holds for BPE models that contain all bytes, with a
    normaliser and a pre-tokenizer that remove nothing. None where that is not certain.
    """
    shrinks = _shrinks(_state(library.normalizer))
    if shrinks is None or not _keeps(_state(library.pre_tokenizer)) or not _knows_bytes(library):
        return None
    added = library.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # these strip all whitespace around them
        return None
    return shrinks * max(_lengths(library))


def utf8_length(text: str) -> int:
    """Return the UTF-8 bytes of a text, slice by slice, to avoid a copy of the text and a long hold of the GIL."""
    if text.isascii():
        return len(text)
    return sum(len(text[at : at + _SLICE].encode(errors="surrogatepass")) for at in range(0, len(text), _SLICE))


def _bytes(text: str) -> int:
    return len(text.encode())


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def flattened(part: dict[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    """Yield the components of a (nested) sequence of the tokenizers library, in order."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for inner in part[name]:
        yield from flattened(inner, name)


def _shrinks(normalizer: dict[str, Any] | None) -> int | None:
    """Return the factor by which a text can become shorter; None: unbounded."""
    factor = 1
    for part in flattened(normalizer, "normalizers"):
        match part:
            case {"type": "Prepend" | "ByteLevel"}:
                pass
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if _bytes(new) >= _bytes(old):
                pass
            case {"type": "NFC"}:
                factor *= _NFC_SHRINKS
            case _:
                return None
    return factor


def _keeps(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Return whether the pre-tokenizer keeps all of a text."""
    return all(
        part["type"] in _SPLITTING or (part["type"] in ("Split", "Punctuation") and part["behavior"] != "Removed")
        for part in flattened(pre_tokenizer, "pretokenizers")
    )


def _has_byte_level(library: Library) -> bool:
    """Return whether each byte of a text is one character of a token."""
    parts = (
        *flattened(_state(library.normalizer), "normalizers"),
        *flattened(_state(library.pre_tokenizer), "pretokenizers"),
    )
    return any(part["type"] == "ByteLevel" for part in parts)


def _knows_bytes(library: Library) -> bool:
    """Return whether text outside the vocabulary becomes bytes: otherwise it may vanish, or become a single token."""
    model = library.model
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if _has_byte_level(library):
        needed = ByteLevel.alphabet()
    elif model.byte_fallback:
        needed = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return False
    return all(model.token_to_id(token) is not None for token in needed)


def _lengths(library: Library) -> Iterator[int]:
    added = {token.content for token in library.get_added_tokens_decoder().values()}
    spelt = _has_byte_level(library)
    for token in library.get_vocab(with_added_tokens=True):
        yield len(token) if spelt and token not in added else len(token.encode())
