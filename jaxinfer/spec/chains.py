"""Index of the occurrences of token pairs, in text that grows at its end and is dropped from its start. No jax."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32, Int64

from jaxinfer.spec.buffer import Buffer


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
