"""Request timings, and the figures computed from them. Runs without numpy or JAX."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass
class _Request:
    due: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


class Timeline:
    """Times of a load's requests, in seconds since `start`.

    Args:
        due: arrival of each request.
    """

    def __init__(self, due: Sequence[float]) -> None:
        self._requests = [_Request(seconds) for seconds in due]
        self.start()

    def start(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def add(self, request: int, tokens: int) -> None:
        """Record ``tokens`` new tokens of a request at this moment."""
        if not tokens:
            return
        found, now = self._requests[request], self.now()
        found.first = found.first or now
        found.last, found.tokens = now, found.tokens + tokens

    def figures(self, output: int) -> dict[str, Any]:
        """Return the figures of a load with ``output`` tokens per request: times in ms, rates in tokens a second.

        Raises:
            RuntimeError: a request has another number of tokens.
        """
        wrong = [at for at, request in enumerate(self._requests) if request.tokens != output]
        if wrong:
            at = wrong[0]
            raise RuntimeError(f"request {at} has {self._requests[at].tokens} tokens, not {output}")
        seconds = max(request.last for request in self._requests)
        ttft = [request.first - request.due for request in self._requests]
        figures = {
            "seconds": round(seconds, 4),
            "requests_per_second": len(ttft) / seconds,
            "output_tokens_per_second": len(ttft) * output / seconds,
            **_spread("ttft_ms", ttft),
        }
        if output > 1:
            figures |= _spread("tpot_ms", [(one.last - one.first) / (output - 1) for one in self._requests])
        return figures


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p99": 0.99}
    return {f"{name}_{key}": round(1e3 * ordered[int(share * (len(ordered) - 1))], 3) for key, share in at.items()}
