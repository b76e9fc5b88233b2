"""What a helper says of a matcher. No jax."""

from __future__ import annotations

from typing import NamedTuple

STOPPED = "stopped"
UNAVAILABLE = "no helper process for grammars can be started now: the machine lacks descriptors, processes or memory"
"""The state of an answer that the machine prevents, not the grammar: a retry is worthwhile."""


class Answer(NamedTuple):
    """What a matcher says.

    Attributes:
        state: None: it goes on; ``stopped``; or why it cannot.
        tokens: that must follow, as models would say it.
        masks: the next one and those behind each of the tokens: their ids, or None for one that is behind the line.
        slow: the grammar was known, and the mask took long all the same.
        burden: CPU seconds per mask, with the compilation of the grammar shared out over some masks.
    """

    state: str | None
    tokens: list[int]
    masks: list[list[int] | None]
    slow: bool = False
    burden: float = 0.0
