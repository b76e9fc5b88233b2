"""Draft tokens from a sequence's own past. No jax.

Prompt lookup decoding (Saxena 2023): where the last few tokens occurred before, what followed them then is a fair guess
at what follows now. Good at summaries, edits and code; free of charge elsewhere.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int32

from jaxinfer.spec.drafter import Drafted

# A longest match this near is taken without a look at the rest: sequences in a loop have thousands of candidates.
_RECENT = 256


@dataclasses.dataclass(frozen=True)
class NgramDrafter:
    """Looks up the longest suffix of ``min_n`` to ``max_n`` tokens that occurred before, at its latest occurrence.

    Raises:
        ValueError: not 1 <= min_n <= max_n.
    """

    min_n: int = 2
    max_n: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.min_n <= self.max_n:
            raise ValueError(f"min_n = {self.min_n} and max_n = {self.max_n}: 1 <= min_n <= max_n is needed")

    def propose(self, sequence: Drafted, limit: int) -> Int32[np.ndarray, " drafts"]:
        """The tokens after that occurrence; O(tokens). A guess may run into itself, as a match in LZ77 does, so a
        history that ends in a loop is continued for ``limit`` tokens, however short the loop."""
        history = sequence.tokens
        n, end = self._occurrence(history[-_RECENT:])
        if n < self.max_n and len(history) > _RECENT:
            n, end = self._occurrence(history)
        if not n:
            return history[:0]
        follows = history[-end:]
        return follows[np.arange(max(limit, 0)) % end]

    def end(self, sequence: Drafted) -> None:
        """Nothing is kept."""

    def reset(self) -> None:
        """Nothing is kept."""

    def _occurrence(self, history: Int32[np.ndarray, " tokens"]) -> tuple[int, int]:
        """The length of the longest suffix that occurred before (0: none) and how many tokens ago it last ended."""
        length, ends, found = len(history), np.arange(0), (0, 0)
        for n in range(1, min(self.max_n, length - 1) + 1):
            if n == 1:
                ends = np.flatnonzero(history[:-1] == history[-1]) + 1
            else:
                ends = ends[ends >= n]
                ends = ends[history[ends - n] == history[length - n]]
            if not ends.size:
                break
            if n >= self.min_n:
                found = (n, length - int(ends[-1]))
        return found
