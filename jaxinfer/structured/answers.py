"""What a helper says of a matcher. No jax."""

from __future__ import annotations

from typing import NamedTuple

STOPPED = "stopped"
UNAVAILABLE = "no helper process for grammars can be started now: the machine lacks descriptors, processes or memory"
"""A state that is about the machine, not about the grammar: it is worth trying again."""


class Answer(NamedTuple):
    """What a matcher says.

    Attributes:
        state: None: it goes on; ``stopped``; or why it cannot.
        tokens: that must follow, as models would say it.
        masks: the next one and those behind each of the tokens: their ids, or None for one that is behind the line.
        slow: the grammar was known, and the mask took long all the same.
        burden: seconds of the processor for a mask, to learn the grammar shared out over some masks.
    """

    state: str | None
    tokens: list[int]
    masks: list[list[int] | None]
    slow: bool = False
    burden: float = 0.0
