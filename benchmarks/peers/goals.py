"""Performance goals of jaxinfer against its peers, and whether a row reaches them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Goal:
    """Minimum ratio of jaxinfer's rate to a peer's: the goal, and an optional floor that must hold."""

    goal: float
    floor: float | None = None

    def verdict(self, ratio: float) -> str:
        if ratio >= self.goal:
            return "goal"
        if self.floor is None:
            return "below goal"
        return "floor" if ratio >= self.floor else "below floor"


_PREFILL = {"float32": Goal(1.2, 1.1), "bfloat16": Goal(1.0, 0.85)}


_FIRST_TOKEN = {"transformers": Goal(1.0), "llama.cpp": Goal(0.7)}
_LONGEST_FIRST = 64


def goal_for(peer: str, phase: str, dtype: str, batch: int | None, prompt: int) -> Goal | None:
    """Return the goal of a row against a peer, or None. ``batch``: None: one sequence with default settings."""
    if batch is None:
        if phase == "prefill":
            return _FIRST_TOKEN[peer] if prompt <= _LONGEST_FIRST else None
        return Goal(1.3) if peer == "transformers" else Goal(0.9)
    if peer == "transformers" and phase == "prefill":
        return _PREFILL[dtype]
    if peer == "transformers":
        return Goal(2.5, 2.0) if (dtype, batch) == ("float32", 1) else Goal(1.5, 1.2)
    if peer == "llama.cpp" and phase == "decode" and (batch <= 8 or dtype == "float32"):
        return Goal(0.9 if batch <= 8 else 0.8)
    return None
