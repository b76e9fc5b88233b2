"""Draft tokens from a sequence's own past. No jax.

Prompt lookup decoding (Saxena 2023): where the last few tokens occurred before, what followed them then is a fair guess
at what follows now. Good at summaries, edits and code; free of charge elsewhere.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int32, Int64

from jaxinfer.spec.drafter import Drafted
from jaxinfer.spec.tree import Tree

# A longest match this near is taken without a look at the rest: sequences in a loop have thousands of candidates.
_RECENT = 256
# Most occurrences of each length that are looked at for another continuation, the latest ones.
_OTHERS = 64


@dataclasses.dataclass(frozen=True)
class NgramDrafter:
    """Looks up the longest suffix of ``min_n`` to ``max_n`` tokens that occurred before, at its latest occurrence. Of
    ``paths`` above 1 there are as many where others go on with another token: longer suffixes first, then later ones.

    Raises:
        ValueError: not 1 <= min_n <= max_n.
    """

    min_n: int = 2
    max_n: int = 4
    paths: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.min_n <= self.max_n:
            raise ValueError(f"min_n = {self.min_n} and max_n = {self.max_n}: 1 <= min_n <= max_n is needed")

    def propose(self, sequence: Drafted, limit: int) -> Tree:
        """The tokens after that occurrence; O(tokens). A guess may run into itself, as a match in LZ77 does, so a
        history that ends in a loop is continued for ``limit`` tokens, however short the loop."""
        history, limit = sequence.tokens, max(limit, 0)
        found = self._occurrences(history[-_RECENT:])
        if len(found) <= self.max_n - self.min_n and len(history) > _RECENT:
            found = self._occurrences(history)
        if not found:
            return Tree.chain(history[:0])
        if self.paths == 1:
            return Tree.chain(_follow(history, int(found[-1][-1]), limit))
        starts = itertools.islice(_different(history, found), self.paths)
        return Tree.of_paths([_follow(history, ago, limit).tolist() for ago in starts])

    def end(self, sequence: Drafted) -> None:
        """Nothing is kept."""

    def reset(self) -> None:
        """Nothing is kept."""

    def _occurrences(self, history: Int32[np.ndarray, " tokens"]) -> list[Int64[np.ndarray, " _"]]:
        """How many tokens ago suffixes ended before, the oldest first; those of ``min_n`` tokens, of one more and so on
        while there are any."""
        length, ends, found = len(history), np.arange(0), list[np.ndarray]()
        for n in range(1, min(self.max_n, length - 1) + 1):
            if n == 1:
                ends = np.flatnonzero(history[:-1] == history[-1]) + 1
            else:
                ends = ends[ends >= n]
                ends = ends[history[ends - n] == history[length - n]]
            if not ends.size:
                break
            if n >= self.min_n:
                found.append(length - ends)
        return found


def _follow(history: Int32[np.ndarray, " tokens"], ago: int, limit: int) -> Int32[np.ndarray, " drafts"]:
    """What followed ``ago`` tokens ago."""
    return history[-ago:][np.arange(limit) % ago]


def _different(history: Int32[np.ndarray, " tokens"], found: list[Int64[np.ndarray, " _"]]) -> Iterator[int]:
    """How many tokens ago there were occurrences that go on with different tokens."""
    seen = set[int]()
    for ago in itertools.chain.from_iterable(each[: -1 - _OTHERS : -1].tolist() for each in reversed(found)):
        if (token := int(history[-ago])) not in seen:
            seen.add(token)
            yield ago
