"""A grammar at the place where a sequence is: which token may follow. No jax."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from jaxinfer.structured.grammar import LIMITS, compiled, short
from jaxinfer.structured.schemas import GrammarError

LEAD = -1
"""In place of a token: the answer begins here, behind a thought. Models part them by space, which may be said once."""
_MOST_SPACE = 4  # characters
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

    @property
    def names(self) -> dict[str, int]:
        """Special tokens by their names, but for those that end an output: these are no part of it."""
        inner = (self.special - frozenset(self.ends)) & frozenset(range(min(len(self.tokens), self.size)))
        return {name: each for each in sorted(inner) if (name := self.tokens[each].decode(errors="replace"))}

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


class Speller:
    """Spells a text in the longest tokens, one behind the other. Tokenizers mostly do the same, and models what those
    do: it is a guess."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = enumerate(vocabulary.tokens[: vocabulary.size])
        known = [(each, number) for number, each in tokens if each and number not in vocabulary.special]
        self._ids = dict(reversed(known))  # the first of those that stand for the same
        self._longest = max(map(len, self._ids), default=0)
        self.spaces = frozenset(n for text, n in known if text.isspace() and len(text) <= _MOST_SPACE)

    def spell(self, text: bytes, most: int) -> list[int]:
        """The text, or its beginning, in up to so many tokens."""
        found, at = list[int](), 0
        while at < len(text) and len(found) < most:
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:
                break
            found.append(self._ids[text[at:end]])
            at = end
        return found


class Matcher:
    """A matcher of one sequence.

    Args:
        library: in its first state.
        words: 32-bit words of a mask.
        ends: token ids that end an output.
        speller: of what must follow.

    Raises:
        GrammarError: of every method: the grammar needs more than the library's limits, or a token was not allowed.
            That is final.
    """

    def __init__(self, library: LLMatcher, words: int, ends: Sequence[int], speller: Speller) -> None:
        self._library, self._bytes, self._ends, self._speller = library, 4 * words, ends, speller
        self._spaces = frozenset[int]()  # that may be said, and the grammar does not hear of

    def consume(self, tokens: Sequence[int]) -> None:
        """Go on by tokens that the sequence has said; see `LEAD`."""
        said = list(tokens)
        if said[0] == LEAD:
            own = int.from_bytes(self.mask(), "little")
            self._spaces = self._speller.spaces
            if any(own >> space & 1 for space in self._spaces):
                self._spaces = frozenset()  # space is the grammar's own
            del said[0]
        if said and self._spaces:
            del said[: said[0] in self._spaces]
            self._spaces = frozenset()
        self._library.consume_tokens(said)
        self._check()

    def rollback(self, count: int) -> None:
        """Go back by so many tokens."""
        self._library.rollback(count)
        self._check()

    def mask(self) -> bytes:
        """The tokens that may follow: int32 words, bit ``i % 32`` of word ``i // 32`` for token i."""
        mask = self._library.compute_bitmask()
        self._check()
        if len(mask) != self._bytes:
            mask = mask[: self._bytes].ljust(self._bytes, b"\0")
        return _with(mask, self._spaces) if self._spaces else mask

    def forced(self) -> bytes:
        """The text that must follow, whatever the model says."""
        if self._spaces:
            return b""
        found = self._library.compute_ff_bytes()
        self._check()
        return found

    def ahead(self, most: int) -> tuple[list[int], list[bytes]]:
        """What must follow, in up to so many tokens as models would say it, and the mask behind each of them. The last
        one is left out where nothing can follow it."""
        masks = list[bytes]()
        for count, token in enumerate(tokens := self._speller.spell(self.forced(), most), 1):
            self.consume([token])
            mask = self.mask()
            if self.stopped or is_empty(mask):
                self.rollback(count)
                break
            masks.append(mask)
        else:
            self.rollback(len(tokens))
        return tokens[: len(masks)], masks

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


def is_empty(mask: bytes) -> bool:
    """Whether it allows nothing."""
    return mask.count(0) == len(mask)


def _with(mask: bytes, tokens: Iterable[int]) -> bytes:
    bits = bytearray(mask)
    for token in tokens:
        bits[token >> 3] |= 1 << (token & 7)
    return bytes(bits)


class Matchers:
    """Makes matchers of grammars over one vocabulary, and remembers those that were compiled last."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer, self._special = _tokenizer(vocabulary), vocabulary.names
        self._speller = Speller(vocabulary)
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
            grammar = compiled(kind, text, self._tokenizer, self._special)
            library = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
            if library.is_error():
                raise GrammarError(short(library.get_error()))
            self._keep(key, library)
        self._cached.move_to_end(key)
        return Matcher(library.deep_copy(), self._vocabulary.words, self._vocabulary.ends, self._speller)

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
        self.ends = list(vocabulary.ends)
        if not self.ends:  # the library wants one: a token that no model has
            self.ends = [len(self.tokens)]
            self.special_token_ids += self.ends
            self.tokens.append(_SPECIAL + b"<no end>")
        self.eos_token_id = self.ends[0]

    def __call__(self, text: bytes) -> list[int]:
        return []  # asked for where tokens are forced: none is


def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    tokens = _Tokens(vocabulary)
    return LLTokenizer(TokenizerWrapper(tokens), eos_token=tokens.ends)
