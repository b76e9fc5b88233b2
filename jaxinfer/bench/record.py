"""Record of one request."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any


def _doubles() -> array[float]:
    return array("d")


def _numbers() -> array[int]:
    return array("L")


@dataclasses.dataclass(slots=True)
class Record:
    """Measurements of one request. Times are seconds since the run began.

    Attributes:
        due: scheduled time of sending.
        sent: actual time of sending.
        times, counts: time of receipt, and number of tokens, of each delivery.
        ended: time at which the stream ended, also if it failed.
        output_tokens: the server's count; ``estimated``: it gives none, and deliveries were counted.
        error_kind: None: the request succeeded.
    """

    number: int
    due: float
    sent: float
    asked_prompt: int
    asked_output: int
    times: array[float] = dataclasses.field(default_factory=_doubles)
    counts: array[int] = dataclasses.field(default_factory=_numbers)
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    estimated: bool = False
    finish: str | None = None
    error_kind: str | None = None
    error: str | None = None

    def note(self, time: float, tokens: int) -> None:
        """Record a delivery of ``tokens`` at ``time``."""
        self.times.append(time)
        self.counts.append(tokens)

    @property
    def ttft(self) -> float | None:
        """Time to first token, from the due time of the request: a late sender must not make a server look fast."""
        return self.times[0] - self.due if self.times else None

    @property
    def ttft_sent(self) -> float | None:
        return self.times[0] - self.sent if self.times else None

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None if there is only one delivery or token."""
        if len(self.times) < 2 or self.output_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: gaps between deliveries, regardless of their number of tokens."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def e2e(self) -> float:
        return self.ended - self.due

    @property
    def e2e_sent(self) -> float:
        return self.ended - self.sent

    def as_json(self) -> dict[str, Any]:
        """Return the fields for the raw file, times rounded to the microsecond."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del found["times"], found["counts"]
        found |= {name: round(found[name], 6) for name in ("due", "sent", "ended")}
        found["deliveries"] = [[round(time, 6), count] for time, count in zip(self.times, self.counts, strict=True)]
        return found
