"""A grammar at the place where a sequence is: which token may follow. No jax."""

from __future__ import annotations

import collections
import json
from collections.abc import Sequence
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from jaxinfer.structured.grammar import LIMITS, GrammarError, compiled, short

_SPECIAL = b"\xff"  # before the name of a token that is no text, as llguidance marks it
_MAX_CACHED, _MAX_CACHED_CHARACTERS = 256, 4 << 20
"""Compiled, a text has up to 150 times its size: what is cached has at most 600 MiB."""


class Vocabulary(NamedTuple):
    """The tokens that a grammar speaks of.

    Attributes:
        tokens: the bytes that each id stands for.
        special: ids that stand for no text; a grammar may name them (Lark: ``<|name|>``).
        ends: ids that end an output.
        size: token ids that the model scores, of which those beyond ``tokens`` are never allowed.
    """

    tokens: Sequence[bytes]
    special: frozenset[int]
    ends: Sequence[int]
    size: int

    @property
    def words(self) -> int:
        """32-bit words of a mask."""
        return -(-self.size // 32)

    def packed(self) -> bytes:
        """All of it, for `unpacked`."""
        head = json.dumps([[len(each) for each in self.tokens], sorted(self.special), list(self.ends), self.size])
        return b"\n".join([head.encode(), b"".join(self.tokens)])

    @classmethod
    def unpacked(cls, data: bytes) -> Vocabulary:
        """What `packed` gave."""
        head, _, rest = data.partition(b"\n")
        lengths, special, ends, size = json.loads(head)
        tokens, at = [], 0
        for length in lengths:
            tokens.append(rest[at : at + length])
            at += length
        return cls(tokens, frozenset(special), ends, size)


class Matcher:
    """A matcher of one sequence.

    Args:
        library: in its first state.
        words: 32-bit words of a mask.
        ends: token ids that end an output.

    Raises:
        GrammarError: of every method: the grammar needs more than the library's limits, or a token was not allowed.
            That is final.
    """

    def __init__(self, library: LLMatcher, words: int, ends: Sequence[int]) -> None:
        self._library, self._bytes, self._ends = library, 4 * words, ends

    def consume(self, tokens: Sequence[int]) -> None:
        """Go on by tokens that the sequence has said."""
        self._library.consume_tokens(list(tokens))
        self._check()

    def rollback(self, count: int) -> None:
        """Go back by so many tokens."""
        self._library.rollback(count)
        self._check()

    def mask(self) -> bytes:
        """The tokens that may follow: int32 words, bit ``i % 32`` of word ``i // 32`` for token i."""
        mask = self._library.compute_bitmask()
        self._check()
        return mask[: self._bytes].ljust(self._bytes, b"\0")

    def forced(self) -> bytes:
        """The text that must follow, whatever the model says."""
        found = self._library.compute_ff_bytes()
        self._check()
        return found

    @property
    def accepting(self) -> bool:
        """Whether the output may end here."""
        return self._library.is_accepting()

    @property
    def stopped(self) -> bool:
        """Whether the output is whole, and nothing can follow. To be asked behind `mask`."""
        return self._library.is_stopped()

    def _check(self) -> None:
        if self._library.is_error():
            raise GrammarError(short(self._library.get_error()))


class Matchers:
    """Makes matchers of grammars over one vocabulary, and remembers those that were compiled last."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = _tokenizer(vocabulary)
        # By whose it is, too: how long a grammar takes tells nobody what another tenant has asked for.
        self._cached: collections.OrderedDict[tuple[str, str, str], LLMatcher] = collections.OrderedDict()
        self._size = 0

    def new(self, kind: str, text: str, scope: str = "") -> Matcher:
        """A matcher at the beginning of an output.

        Raises:
            GrammarError: the grammar cannot be held.
        """
        key = (scope, kind, text)
        library = self._cached.get(key)
        if library is None:
            library = LLMatcher(self._tokenizer, compiled(kind, text, self._tokenizer), log_level=0, limits=LIMITS)
            if library.is_error():
                raise GrammarError(short(library.get_error()))
            self._keep(key, library)
        self._cached.move_to_end(key)
        return Matcher(library.deep_copy(), self._vocabulary.words, self._vocabulary.ends)

    def _keep(self, key: tuple[str, str, str], library: LLMatcher) -> None:
        self._cached[key] = library
        self._size += len(key[2])
        while len(self._cached) > 1 and (len(self._cached) > _MAX_CACHED or self._size > _MAX_CACHED_CHARACTERS):
            (_, _, text), _ = self._cached.popitem(last=False)
            self._size -= len(text)


class _Tokens:
    """The vocabulary as llguidance asks for it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        known = vocabulary.tokens[: vocabulary.size]
        self.tokens = [
            _SPECIAL + (each or f"<[{number}]>".encode()) if number in vocabulary.special else each
            for number, each in enumerate(known)
        ]
        self.special_token_ids = sorted(vocabulary.special)
        self.eos_token_id = next(iter(vocabulary.ends), None)

    def __call__(self, text: bytes) -> list[int]:
        return []  # asked for where tokens are forced: none is


def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)), eos_token=list(vocabulary.ends))
