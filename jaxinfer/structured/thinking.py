"""Reasoning before a constrained answer: the grammar applies after it, and it may have a token budget. No jax."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from jaxinfer.types import Thinking


class Thought:
    """Reasoning state of one sequence, as far as its tokens are known.

    Unless the prompt has opened the reasoning, the first token shows whether there is any. The grammar constrains that
    token, with the begin token allowed in addition.

    Args:
        tags: tokens that delimit the reasoning.
        budget: maximum tokens before it is closed; None: unbounded.

    Attributes:
        open: the sequence is within it.
        over: the reasoning has ended, or there will be none.
    """

    __slots__ = ("_budget", "_offered", "_said", "_tags", "open", "over")

    def __init__(self, tags: Thinking, budget: int | None) -> None:
        self._tags, self._budget = tags, budget
        self.open, self.over = tags.is_open, False
        self._said, self._offered = 0, True

    def say(self, tokens: Sequence[int]) -> Sequence[int]:
        """Take generated tokens; return those after the reasoning and its tags."""
        return tokens[sum(1 for _ in itertools.takewhile(self._takes, tokens)) :]

    def _takes(self, token: int) -> bool:
        if self.open:
            self.over = token == self._tags.end
            self.open = not self.over
            self._said += self.open
            return True
        self.open = not self.over and self._offered and token == self._tags.begin
        self.over = not self.open
        return self.open

    @property
    def room(self) -> int | None:
        """Number of unconstrained tokens left in the budget; None: no budget."""
        return None if self._budget is None else self._budget + (not self.open) - self._said

    def beginning(self, mask: np.ndarray) -> np.ndarray:
        """Return the mask of a first token: the grammar's, plus the token that begins the reasoning."""
        begin = self._tags.begin
        self._offered = begin is not None and not mask.view(np.uint32)[begin >> 5] >> np.uint32(begin & 31) & 1
        return self._with(mask, begin) if self._offered and begin is not None else mask

    def closing(self) -> np.ndarray:
        """Return the mask that allows only the end token of the reasoning. Its missing words count as 0."""
        end = self._tags.end
        return self._with(np.zeros((end >> 5) + 1, np.int32), end)

    @staticmethod
    def _with(mask: np.ndarray, token: int) -> np.ndarray:
        bits = mask.view(np.uint32).copy()
        bits[token >> 5] |= np.uint32(1) << np.uint32(token & 31)
        return bits.view(np.int32)
