"""Messages to and from a grammar helper. No jax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

STOPPED = "stopped"
UNAVAILABLE = "no helper process for grammars can be started now: the machine lacks descriptors, processes or memory"
"""Error state for failures of the machine rather than the grammar: a retry may succeed."""

Item = tuple[int, tuple[str, str, str] | None, Sequence[int]]
"""Request for a matcher: its number, its grammar (kind, text and scope; None: known) and the tokens to consume."""


class Ask(msgspec.Struct, array_like=True):
    """A request for masks.

    Attributes:
        end: numbers of matchers to drop.
        quick: another helper compiled the new grammars quickly: this one keeps its priority.
    """

    items: Sequence[Item]
    end: Sequence[int]
    quick: bool = False


class Answer(NamedTuple):
    """Reply for one matcher.

    Attributes:
        state: None: the output may continue; ``stopped``; or the error.
        tokens: forced tokens, as a model would tokenise the text.
        masks: the next mask and those after each of the tokens: as token ids or bits.
        slow: the grammar was known, and the mask still took long.
        burden: CPU seconds per mask, with the compilation of the grammar amortised over some masks.
    """

    state: str | None
    tokens: list[int]
    masks: list[list[int] | bytes]
    slow: bool = False
    burden: float = 0.0
