"""Replies of a grammar helper about a matcher. No jax."""

from __future__ import annotations

from typing import NamedTuple

STOPPED = "stopped"
UNAVAILABLE = "no helper process for grammars can be started now: the machine lacks descriptors, processes or memory"
"""Error state for failures of the machine rather than the grammar: a retry may succeed."""


class Answer(NamedTuple):
    """Reply for one matcher.

    Attributes:
        state: None: the output may continue; ``stopped``; or the error.
        tokens: forced tokens, as a model would tokenise the text.
        masks: the next mask and those after each of the tokens: as token ids, or None if the mask follows the line.
        slow: the grammar was known, and the mask still took long.
        burden: CPU seconds per mask, with the compilation of the grammar amortised over some masks.
    """

    state: str | None
    tokens: list[int]
    masks: list[list[int] | None]
    slow: bool = False
    burden: float = 0.0
