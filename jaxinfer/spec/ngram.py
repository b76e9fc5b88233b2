"""N-gram drafter: draft tokens from a sequence's own history. No jax.

Prompt lookup decoding (Saxena 2023): the tokens that followed an earlier occurrence of the last few tokens are the
draft. Good at summaries, edits and code; no cost elsewhere.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int32, Int64

from jaxinfer.spec.drafter import Drafted, Drafter
from jaxinfer.spec.tree import Tree

# A longest match within this distance is taken without a full search: looping sequences have thousands of candidates.
_RECENT = 256
# Maximum occurrences of each length that are searched for other continuations, the latest ones.
_OTHERS = 64


@dataclasses.dataclass(frozen=True)
class NgramDrafter(Drafter):
    """Drafter that looks up the latest earlier occurrence of the longest suffix of ``min_n`` to ``max_n`` tokens. With
    ``paths`` > 1 it also returns occurrences with other next tokens: longer suffixes first, then later ones.

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
        """Propose the tokens after that occurrence; O(tokens). A guess may run into itself, as a match in LZ77 does, so
        a history that ends in a loop is continued for ``limit`` tokens, however short the loop."""
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

    def _occurrences(self, history: Int32[np.ndarray, " tokens"]) -> list[Int64[np.ndarray, " _"]]:
        """Return how many tokens ago earlier occurrences of the suffix ended, oldest first; one array for each suffix
        length from ``min_n``, while there are any."""
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
    """Return the tokens that followed the position ``ago`` tokens back."""
    return history[-ago:][np.arange(limit) % ago]


def _different(history: Int32[np.ndarray, " tokens"], found: list[Int64[np.ndarray, " _"]]) -> Iterator[int]:
    """Yield how many tokens ago occurrences with distinct next tokens were."""
    seen = set[int]()
    for ago in itertools.chain.from_iterable(each[: -1 - _OTHERS : -1].tolist() for each in reversed(found)):
        if (token := int(history[-ago])) not in seen:
            seen.add(token)
            yield ago
