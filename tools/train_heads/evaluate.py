"""Acceptance of a head's draft tokens, measured through the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams

DRAFTS = 4  # tokens of a draft
TOGETHER = 8  # sequences at once, each with rows for a whole draft
TEMPERATURES = (0.0, 0.7, 1.0)
SPEAKERS = (
    *("ROMEO", "JULIET", "KING RICHARD III", "DUKE OF YORK"),
    *("First Citizen", "HAMLET", "CLIFFORD", "MENENIUS"),
)  # names that are the prompts of benchmarks/speculation.py


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Acceptance: ``length`` is 1 + accepted / drafts; ``by_position`` the share accepted up to each position."""

    drafts: int
    length: float
    by_position: tuple[float, ...]


def engine(target: str, method: str, head: str, longest: int) -> LLM:
    """Build a float32 engine that drafts at every step."""
    settings: dict[str, Any] = {"max_num_seqs": TOGETHER * (1 + DRAFTS), "max_model_len": longest}
    drafts: dict[str, Any] = {"speculative": method, "speculative_model": head, "num_speculative_tokens": DRAFTS}
    return LLM(target, "float32", speculative_adaptive=False, show_progress=False, **settings, **drafts)


def acceptance(llm: LLM, prompts: Sequence[list[int]], temperature: float, tokens: int = 128) -> Acceptance:
    """Measure outputs of ``tokens`` tokens for ``prompts``."""
    before = llm.engine.stats()
    for at in range(0, len(prompts), TOGETHER):
        params = [
            SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=at + place)
            for place in range(len(prompts[at : at + TOGETHER]))
        ]
        llm.generate(list(prompts[at : at + TOGETHER]), params)
    now = llm.engine.stats()
    drafts = now.drafts - before.drafts
    earlier = (*before.draft_accepted_at, *[0] * len(now.draft_accepted_at))
    counts = [count - less for count, less in zip(now.draft_accepted_at, earlier, strict=False)]
    share = tuple(round(count / drafts, 4) for count in counts)
    return Acceptance(drafts, round(1 + (now.draft_accepted - before.draft_accepted) / drafts, 4), share)
