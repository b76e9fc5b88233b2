"""The thought in front of an answer: a grammar holds what is behind it, and it may have a budget. No jax."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from jaxinfer.types import Thinking


class Thought:
    """The thought of one sequence, as far as its tokens are known.

    Unless the prompt has opened it, its first token tells whether there will be one. A grammar holds that token, which
    may begin a thought all the same.

    Args:
        tags: the tokens around it.
        budget: tokens that it may have before it is closed; None: any number.

    Attributes:
        open: the sequence is within it.
        over: there is none any more, and there will be none.
    """

    __slots__ = ("_budget", "_offered", "_said", "_tags", "open", "over")

    def __init__(self, tags: Thinking, budget: int | None) -> None:
        self._tags, self._budget = tags, budget
        self.open, self.over = tags.is_open, False
        self._said, self._offered = 0, True

    def say(self, tokens: Sequence[int]) -> Sequence[int]:
        """Note tokens that the sequence has said; those that are not of the thought, nor its tags."""
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
        """Tokens from now on that may be any, as far as the budget goes; None: there is none."""
        return None if self._budget is None else self._budget + (not self.open) - self._said

    def beginning(self, mask: np.ndarray) -> np.ndarray:
        """The mask of a first token: what the grammar allows, and what begins a thought."""
        begin = self._tags.begin
        self._offered = begin is not None and not mask.view(np.uint32)[begin >> 5] >> np.uint32(begin & 31) & 1
        return self._with(mask, begin) if self._offered and begin is not None else mask

    def closing(self) -> np.ndarray:
        """The mask that leaves nothing but the end of the thought. Words behind its own are 0."""
        end = self._tags.end
        return self._with(np.zeros((end >> 5) + 1, np.int32), end)

    @staticmethod
    def _with(mask: np.ndarray, token: int) -> np.ndarray:
        bits = mask.view(np.uint32).copy()
        bits[token >> 5] |= np.uint32(1) << np.uint32(token & 31)
        return bits.view(np.int32)
