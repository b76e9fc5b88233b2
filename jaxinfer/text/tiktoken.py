"""Rank files of the tiktoken library: lines of a token's bytes in base64, and its rank.

The rest of such a tokenizer is code in the checkpoint, which is not run: the pre-tokenizer, and the number of special
tokens after the ranks, are defined here by the class that tokenizer_config.json names.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from jaxinfer.text.declared import read_declared, special
from jaxinfer.text.files import read_bytes, read_object
from jaxinfer.text.pieces import TokenizerError

FILE = "tiktoken.model"
MAX_BYTES = 64 << 20
"""Maximum file size; files of 160,000 tokens have 3 MiB."""
MAX_TOKEN = 512
"""Maximum bytes of a token: each of its splits is looked up."""

_HAN = r"[\p{Han}]+"
_BEFORE, _ENDING = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_REST = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_KIMI = f"{_HAN}|{_BEFORE}{_UPPER}*{_LOWER}+{_ENDING}|{_BEFORE}{_UPPER}+{_LOWER}*{_ENDING}|{_REST}"


@dataclasses.dataclass(frozen=True)
class Rule:
    """Rules that a checkpoint's code defines.

    Attributes:
        expression: matches and the text between them are the words that merges stay within.
        reserved: number of special tokens after the ranks, whether tokenizer_config.json names them or not.
    """

    expression: str
    reserved: int


RULES: Mapping[str, Rule] = MappingProxyType({"TikTokenTokenizer": Rule(_KIMI, 256)})
"""Rules by ``tokenizer_class``: Kimi models, from Moonlight on."""


def tiktoken_library(folder: Path) -> Library:
    """Return a tokenizer of the tokenizers library equivalent to ``folder/tiktoken.model`` and its code.

    Raises:
        TokenizerError: the file is unreadable or invalid, or belongs to unknown code.
    """
    path = folder / FILE
    name = read_object(folder / "tokenizer_config.json", TokenizerError).get("tokenizer_class")
    rule = RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        known = ", ".join(RULES)
        raise TokenizerError(
            f"{path} is cut by code: tokenizer_class = {str(name)[:80]!r} is not known (known: {known})"
        )
    ranks = read_ranks(path)
    library = Library(models.BPE(_vocabulary(ranks), [*_merges(ranks)], ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(rule.expression), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    library.decoder = decoders.ByteLevel()
    _add_special(library, folder, rule.reserved)
    return library


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read the tokens of a file, whose ranks must be all numbers from 0 on.

    Raises:
        TokenizerError: the file is unreadable or invalid.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path, MAX_BYTES, TokenizerError).splitlines(), 1):
        if line:
            token, rank = _entry(line, f"line {number} of {path}")
            if rank != len(ranks) or token in ranks:
                raise TokenizerError(
                    f"line {number} of {path} has rank {rank}, or a token that stands twice, in place of {len(ranks)}"
                )
            ranks[token] = rank
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise TokenizerError(f"{path} has no token for the byte {missing[0]}")
    return ranks


def _entry(line: bytes, where: str) -> tuple[bytes, int]:
    encoded, _, rank = line.partition(b" ")
    try:
        token = base64.b64decode(encoded, validate=True)
    except binascii.Error as cause:
        raise TokenizerError(f"{where} has no token in base64: {cause}") from cause
    if not token or len(token) > MAX_TOKEN or not rank.isdigit() or len(rank) > len(str(MAX_BYTES)):
        raise TokenizerError(f"{where} is not a token of 1 to {MAX_TOKEN} bytes and its rank")
    return token, int(rank)


def _characters() -> tuple[str, ...]:
    """Return the library's character for each byte: printable ones are themselves, the rest follow from U+0100 on."""
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return tuple(chr(byte) if byte in shown else chr(0x100 + hidden.index(byte)) for byte in range(256))


_TABLE = {ord(chr(byte)): character for byte, character in enumerate(_characters())}


def _spelt(token: bytes) -> str:
    return token.decode("latin-1").translate(_TABLE)


def _vocabulary(ranks: Mapping[bytes, int]) -> dict[str, int]:
    return {_spelt(token): rank for token, rank in ranks.items()}


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[str, str]]:
    """Yield all pairs that form a token, by its rank; pairs of one token with lower ranks first."""
    for token in ranks:
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(first, second) for first, second in pairs if first in ranks and second in ranks]
        for first, second in sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]])):
            yield _spelt(first), _spelt(second)


def _add_special(library: Library, folder: Path, reserved: int) -> None:
    """Add the special tokens after the ranks: as tokenizer_config.json names them, or by their numbers."""
    listed, first = read_declared(folder, TokenizerError).listed, library.get_vocab_size()
    tokens = {
        index: listed.get(index) or special(f"<|reserved_token_{index}|>") for index in range(first, first + reserved)
    }
    library.add_tokens([*tokens.values()])
    for index, text in ((index, token.content) for index, token in tokens.items()):
        if library.token_to_id(text) != index:
            raise TokenizerError(
                f"added_tokens_decoder in {folder} has {text[:80]!r} as {index}, which is another token, too"
            )
