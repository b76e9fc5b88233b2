"""Preemption costs: the choice between swapping and recomputing. No jax."""

from __future__ import annotations

import dataclasses

from jaxinfer.engine.scheduling.sequence import Sequence


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of device time, measured at start-up: a page to the host and back, a prompt token, a decode step."""

    swap_page: float = 1e-4
    prefill_token: float = 1e-5
    decode_step: float = 5e-3


def prefer_swap(sequence: Sequence, pages: int, costs: Costs, chunks_end: int) -> bool:
    """Whether swapping the pages to the host and back is cheaper than recomputing them.

    Tokens before ``chunks_end`` are recomputed in chunks, generated ones after it one decode step each.
    """
    steps = len(sequence.tokens) - 1 - chunks_end
    again = chunks_end * costs.prefill_token + steps * costs.decode_step
    return pages * costs.swap_page < again
