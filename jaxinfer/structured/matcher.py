"""Grammar state of a sequence in llguidance: which token may follow. No jax."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from jaxinfer.structured.grammar import LIMITS, compiled, short
from jaxinfer.structured.schemas import GrammarError

LEAD = -1
"""Pseudo token: the answer begins here, after reasoning. Models separate the two by whitespace, allowed once."""
_MOST_SPACE = 4  # characters
_SPECIAL = b"\xff"  # llguidance's prefix for the name of a special token
_MAX_CACHED, _MAX_CACHED_CHARACTERS = 256, 4 << 20
"""Bounds of the cache. A compiled grammar takes up to 150 times the size of its text: at most 600 MiB are cached."""


class Vocabulary(NamedTuple):
    """The tokens over which grammars are defined.

    Attributes:
        tokens: bytes of each id.
        special: ids without text; a grammar may name them (Lark: ``<|name|>``).
        ends: ids that end an output.
        size: token ids that the model scores; those beyond ``tokens`` are never allowed.
    """

    tokens: Sequence[bytes]
    special: frozenset[int]
    ends: Sequence[int]
    size: int

    @property
    def words(self) -> int:
        """Number of 32-bit words of a mask."""
        return -(-self.size // 32)

    @property
    def names(self) -> dict[str, int]:
        """Special tokens by name, without those that end an output and so are not part of it."""
        inner = (self.special - frozenset(self.ends)) & frozenset(range(min(len(self.tokens), self.size)))
        return {name: each for each in sorted(inner) if (name := self.tokens[each].decode(errors="replace"))}


class GreedyTokenizer:
    """Greedy longest-match tokenizer. It approximates real tokenizers, and hence the tokens that models generate."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = enumerate(vocabulary.tokens[: vocabulary.size])
        known = [(each, number) for number, each in tokens if each and number not in vocabulary.special]
        self._ids = dict(reversed(known))  # the first of several ids with the same text
        self._longest = max(map(len, self._ids), default=0)
        self.spaces = frozenset(n for text, n in known if text.isspace() and len(text) <= _MOST_SPACE)

    def spell(self, text: bytes, most: int) -> list[int]:
        """Return the tokens of a text, or of its beginning, at most ``most``."""
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
    """Grammar matcher of one sequence.

    Args:
        library: llguidance matcher in its initial state.
        words: 32-bit words of a mask.
        ends: token ids that end an output.
        speller: tokenizer for forced text.

    Raises:
        GrammarError: by every method: the grammar exceeds the library's limits, or a token was not allowed. The matcher
            cannot be used afterwards.
    """

    def __init__(self, library: LLMatcher, words: int, ends: Sequence[int], speller: GreedyTokenizer) -> None:
        self._library, self._bytes, self._ends, self._speller = library, 4 * words, ends, speller
        self._spaces = frozenset[int]()  # whitespace tokens that are allowed but not passed to the grammar

    def consume(self, tokens: Sequence[int]) -> None:
        """Consume generated tokens; see `LEAD`."""
        said = list(tokens)
        if said[0] == LEAD:
            own = int.from_bytes(self.mask(), "little")
            self._spaces = self._speller.spaces
            if any(own >> space & 1 for space in self._spaces):
                self._spaces = frozenset()  # the grammar allows whitespace itself
            del said[0]
        if said and self._spaces:
            del said[: said[0] in self._spaces]
            self._spaces = frozenset()
        self._library.consume_tokens(said)
        self._check()

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` tokens."""
        self._library.rollback(count)
        self._check()

    def mask(self) -> bytes:
        """Return the allowed tokens: int32 words, bit ``i % 32`` of word ``i // 32`` for token i."""
        mask = self._library.compute_bitmask()
        self._check()
        if len(mask) != self._bytes:
            mask = mask[: self._bytes].ljust(self._bytes, b"\0")
        return _with(mask, self._spaces) if self._spaces else mask

    def forced(self) -> bytes:
        """Return the text that the grammar forces."""
        if self._spaces:
            return b""
        found = self._library.compute_ff_bytes()
        self._check()
        return found

    def ahead(self, most: int) -> tuple[list[int], list[bytes]]:
        """Return forced tokens, at most ``most``, and the mask after each of them. The last one is dropped if nothing
        can follow it."""
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
        """Whether the output is complete, and nothing can follow. Valid after `mask`."""
        return self._library.is_stopped()

    def _check(self) -> None:
        if self._library.is_error():
            raise GrammarError(short(self._library.get_error()))


def is_empty(mask: bytes) -> bool:
    """Return whether a mask allows no token."""
    return mask.count(0) == len(mask)


def _with(mask: bytes, tokens: Iterable[int]) -> bytes:
    bits = bytearray(mask)
    for token in tokens:
        bits[token >> 3] |= 1 << (token & 7)
    return bytes(bits)


class Matchers:
    """Factory of matchers over one vocabulary, with an LRU cache of compiled grammars."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer, self._special = _tokenizer(vocabulary), vocabulary.names
        self._speller = GreedyTokenizer(vocabulary)
        # The key has the scope, too: compile times must not reveal what another tenant has requested.
        self._cached: collections.OrderedDict[tuple[str, str, str], LLMatcher] = collections.OrderedDict()
        self._size = 0

    def new(self, kind: str, text: str, scope: str = "") -> Matcher:
        """Return a matcher at the beginning of an output.

        Raises:
            GrammarError: the grammar cannot be enforced.
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
    """Adapter of the vocabulary to the tokenizer interface of llguidance."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        known = vocabulary.tokens[: vocabulary.size]
        self.tokens = [
            _SPECIAL + (each or f"<[{number}]>".encode()) if number in vocabulary.special else each
            for number, each in enumerate(known)
        ]
        self.special_token_ids = sorted(vocabulary.special)
        self.ends = list(vocabulary.ends)
        if not self.ends:  # the library needs one: a token that no model has
            self.ends = [len(self.tokens)]
            self.special_token_ids += self.ends
            self.tokens.append(_SPECIAL + b"<no end>")
        self.eos_token_id = self.ends[0]

    def __call__(self, text: bytes) -> list[int]:
        return []  # only called if tokens are forced, which is off


def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    tokens = _Tokens(vocabulary)
    return LLTokenizer(TokenizerWrapper(tokens), eos_token=tokens.ends)
