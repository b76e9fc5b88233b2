"""Suffix drafter: draft tokens from a sequence's own text and from earlier outputs. No jax.

SuffixDecoding (Oliaro et al. 2025): the longest suffix that occurred before, in the prompt and output of the request or
in finished outputs, is continued with the most frequent next tokens, as far as the counts support it. A match of n
tokens gives n draft tokens at most. The paper keeps suffix trees; here chains of equal pairs do (`PairChains`), which
cost one dict entry per token.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from jaxinfer.kv.radix import Buffer
from jaxinfer.spec.drafter import Drafted
from jaxinfer.spec.tree import Tree


class PairChains:
    """Tokens with an index of their pairs: the latest position of each pair, and for each position the previous one of
    the same pair (the hash chains of LZ77). One look-up and a walk find a suffix of two tokens or more.

    Positions stay the same while older tokens are dropped.
    """

    def __init__(self) -> None:
        self.tokens, self._before = Buffer(np.int32), Buffer(np.int64)
        self._latest: dict[int, int] = {}

    def extend(self, tokens: Int32[np.ndarray, " new"]) -> None:
        """Append tokens. Amortised O(1) each."""
        first = self.tokens.end
        last = self.tokens.view()[-1:]
        self.tokens.extend(tokens)
        latest, before = self._latest, list[int]()
        if not len(last):
            before.append(-1)
        for place, pair in enumerate(_pairs(np.concatenate([last, tokens])), first + len(before)):
            before.append(latest.get(pair, -1))
            latest[pair] = place
        self._before.extend(np.array(before, np.int64))

    def forget(self, count: int) -> None:
        """Drop the ``count`` oldest tokens."""
        start = self.tokens.start + count
        for pair in _pairs(self.tokens.view()[: count + 1]):
            if self._latest.get(pair, start + 1) <= start:
                del self._latest[pair]
        self.tokens.forget(count)
        self._before.forget(count)

    def places(self, first: int, second: int, most: int, below: int) -> Int64[np.ndarray, " places"]:
        """Return positions of the second token of a pair, latest first: at most ``most``, all before ``below``."""
        found, place = list[int](), self._latest.get(first << 32 | second, -1)
        while place > self.tokens.start and len(found) < most:
            if place < below:
                found.append(place)
            place = self._before[place]
        return np.array(found, np.int64)


def _pairs(tokens: Int32[np.ndarray, " tokens"]) -> list[int]:
    wide = tokens.astype(np.int64)
    return (wide[:-1] << 32 | wide[1:]).tolist()


_DEPTH = 24
"""Maximum suffix length that is compared, in tokens."""
_PLACES = 64
"""Maximum number of earlier occurrences that vote, the latest ones."""
_LEAST = 0.1
"""Minimum share of occurrences that agree with the whole draft; it ends where the share falls below."""
_END = np.array([-1], np.int32)  # separator between outputs: no token


class Turn(NamedTuple):
    """A branching point of a guess: the votes for another token, the tokens up to it, and its occurrences."""

    votes: int
    tokens: list[int]
    places: Int64[np.ndarray, " places"]


class Guess(NamedTuple):
    """Draft tokens, the expected number of accepted ones, and the alternatives along the path."""

    tokens: list[int]
    score: float
    turns: Sequence[Turn] = ()


_NOTHING = Guess([], 0.0)


@dataclasses.dataclass
class _Corpus:
    """Finished outputs of one namespace, the oldest first."""

    chains: PairChains = dataclasses.field(default_factory=PairChains)
    lengths: collections.deque[int] = dataclasses.field(default_factory=collections.deque)


class SuffixDrafter:
    """Drafter that searches the request's own tokens and the finished outputs of its namespace. Other namespaces are
    never searched: timing would reveal their texts.

    Args:
        most: tokens of finished outputs to keep, in all namespaces together; the least recently used namespace loses
        its oldest outputs first.
        paths: maximum continuations of a proposal.
    """

    def __init__(self, most: int, paths: int = 1) -> None:
        self._most, self._kept, self._paths = most, 0, paths
        self._own: dict[int, PairChains] = {}
        self._ended: collections.OrderedDict[bytes, _Corpus] = collections.OrderedDict()

    def propose(self, sequence: Drafted, limit: int) -> Tree:
        """Propose the better of two guesses and, with several paths, the most frequent alternatives; O(new tokens) for
        the index and O(1) for the rest."""
        own = self._own.setdefault(sequence.number, PairChains())
        own.extend(sequence.tokens[len(own.tokens) :])
        context, chains = sequence.tokens[-_DEPTH:], own
        guess = best_guess(own, context, limit, below=own.tokens.end - 1)
        if corpus := self._ended.get(sequence.namespace):
            self._ended.move_to_end(sequence.namespace)
            other = best_guess(corpus.chains, context, limit)
            if other.score > guess.score:
                guess, chains = other, corpus.chains
        if self._paths == 1:
            return Tree.chain(np.array(guess.tokens, np.int32))
        turns = heapq.nlargest(self._paths - 1, guess.turns, key=lambda turn: turn.votes)
        others = (_follow(chains, turn.places, limit, turn.tokens).tokens for turn in turns)
        return Tree.of_paths([guess.tokens, *others])

    def end(self, sequence: Drafted) -> None:
        """Drop the index of the sequence, and keep its output."""
        self._own.pop(sequence.number, None)
        output = sequence.tokens[sequence.prompt :]
        if 2 <= len(output) < self._most:
            corpus = self._ended.setdefault(sequence.namespace, _Corpus())
            self._ended.move_to_end(sequence.namespace)
            corpus.chains.extend(np.concatenate([output, _END]))
            corpus.lengths.append(len(output) + 1)
            self._kept += len(output) + 1
            self._forget()

    def reset(self) -> None:
        """Drop all finished outputs."""
        self._ended.clear()
        self._kept = 0

    def _forget(self) -> None:
        while self._kept > self._most:
            namespace, corpus = next(iter(self._ended.items()))
            length = corpus.lengths.popleft()
            corpus.chains.forget(length)
            self._kept -= length
            if not corpus.lengths:
                del self._ended[namespace]


def best_guess(
    chains: PairChains, context: Int32[np.ndarray, " context"], limit: int, below: int | None = None
) -> Guess:
    """Return the continuation of ``context`` of highest score, of its longest match, of half that length and of two.

    Args:
        below: only occurrences before this index are considered.
    """
    if len(context) < 2 or limit < 1:
        return _NOTHING
    first, second = context[-2:].tolist()
    places = chains.places(first, second, _PLACES, chains.tokens.end if below is None else below)
    if not len(places):
        return _NOTHING
    lengths = _matches(chains, context, places)
    longest = int(lengths.max())
    tries = {longest, max(2, longest // 2), 2}
    guesses = (_follow(chains, places[lengths >= length], min(limit, length)) for length in tries)
    return max(guesses, key=lambda guess: guess.score)


def _matches(
    chains: PairChains, context: Int32[np.ndarray, " context"], places: Int64[np.ndarray, " places"]
) -> Int64[np.ndarray, " places"]:
    """Return the number of tokens before and at each place that match the end of the context; two at least."""
    lengths = np.full(len(places), 2)
    alive = np.arange(len(places))
    for back in range(2, len(context)):
        alive = alive[places[alive] - back >= chains.tokens.start]
        alive = alive[chains.tokens.at(places[alive] - back) == context[-1 - back]]
        if not len(alive):
            break
        lengths[alive] = back + 1
    return lengths


def _follow(chains: PairChains, places: Int64[np.ndarray, " places"], limit: int, start: Sequence[int] = ()) -> Guess:
    """Follow the most frequent next tokens, on a tie the latest. An occurrence may continue into the draft itself.

    Args:
        start: draft tokens already chosen, which end at ``places``.
    """
    tokens, turns, score, count, end = list(start), list[Turn](), 0.0, len(places), chains.tokens.end
    while len(tokens) < limit:
        places = places + 1
        follows = chains.tokens.at(np.minimum(places, end - 1)).tolist()
        for index in np.flatnonzero(places >= end).tolist():
            follows[index] = tokens[int(places[index]) - end]
        (token, votes), *others = collections.Counter(follows).most_common()
        if token < 0 or votes < _LEAST * count:
            break
        said = np.array(follows)
        likely = [(other, votes) for other, votes in others if other >= 0 and votes >= _LEAST * count]
        turns += [Turn(votes, [*tokens, other], places[said == other]) for other, votes in likely]
        tokens.append(token)
        score += votes / count
        places = places[said == token]
    return Guess(tokens, score, turns)
