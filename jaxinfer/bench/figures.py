"""Statistics of requests: latencies, rates, goodput."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.bench.record import Record

MS = 1e3


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p90, p99, max and mean of at least one value, with linear interpolation."""
    found = np.percentile(values, (50, 90, 99, 100))
    return dict(zip(("p50", "p90", "p99", "max"), found.tolist(), strict=True)) | {"mean": float(np.mean(values))}


def guaranteed(values: Sequence[float]) -> dict[str, float]:
    """Return percentiles of a metric that should be large: p90 is what 90 % reach or exceed, ``min`` the worst."""
    found = np.percentile(values, (50, 10, 1, 0))
    return dict(zip(("p50", "p90", "p99", "min"), found.tolist(), strict=True)) | {"mean": float(np.mean(values))}


@dataclasses.dataclass(frozen=True)
class Goals:
    """Latency goals of one request in seconds; None: no goal. A request is good if it succeeded within all of them."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @property
    def any(self) -> bool:
        return any(value is not None for value in dataclasses.astuple(self))

    def met(self, record: Record) -> bool:
        if record.error_kind is not None:
            return False
        pairs = ((self.ttft, record.ttft), (self.tpot, record.tpot), (self.e2e, record.e2e))
        return all(bound is None or value is None or value <= bound for bound, value in pairs)


def summary(records: Sequence[Record], goals: Goals) -> dict[str, Any]:
    """Return the statistics of one run. Times are in seconds; a latency that no request had is None.

    ``ttft`` and ``e2e`` are measured from the due time of a request, ``ttft_sent`` and ``e2e_sent`` from its sending.
    """
    ended = [record for record in records if record.error_kind is None]
    seconds = _span(records)
    return {
        "requests": len(records),
        "completed": len(ended),
        "errors": dict(Counter(record.error_kind for record in records if record.error_kind is not None)),
        "error_examples": _examples(records),
        "other_length": sum(record.output_tokens != record.asked_output for record in ended),
        "estimated_counts": sum(record.estimated for record in ended),
        "seconds": seconds,
        **_rates(records, ended, seconds),
        "peak_in_flight": _peak(records),
        "keeping_up": keeping_up(ended),
        "latency": _latencies(ended),
        "goodput": _goodput(records, goals, seconds) if goals.any else None,
    }


def _span(records: Sequence[Record]) -> float:
    """Return the seconds from the first due time to the last end of a request."""
    if not records:
        return 0.0
    return max(record.ended for record in records) - min(record.due for record in records)


def _rates(records: Sequence[Record], ended: Sequence[Record], seconds: float) -> dict[str, Any]:
    prompt, output = (sum(getattr(r, name) for r in ended) for name in ("prompt_tokens", "output_tokens"))
    per_second = 1 / seconds if seconds else 0.0
    deliveries = sum(len(record.times) for record in ended)
    return {
        "input_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": sum(record.cached_tokens for record in ended),
        "tokens_of_failed_requests": sum(sum(r.counts) for r in records if r.error_kind is not None),
        "requests_per_second": len(ended) * per_second,
        "output_tokens_per_second": output * per_second,
        "tokens_per_second": (prompt + output) * per_second,
        "tokens_per_delivery": output / deliveries if deliveries else None,
    }


def _latencies(ended: Sequence[Record]) -> dict[str, dict[str, float] | None]:
    names = ("ttft", "ttft_sent", "tpot", "e2e", "e2e_sent")
    values = {name: _present(getattr(record, name) for record in ended) for name in names}
    values["itl"] = [gap for record in ended for gap in record.gaps]
    found: dict[str, dict[str, float] | None] = {
        name: percentiles(each) if each else None for name, each in values.items()
    }
    users = [1 / tpot for tpot in values["tpot"] if tpot > 0]
    return found | {"user_tokens_per_second": guaranteed(users) if users else None}


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _goodput(records: Sequence[Record], goals: Goals, seconds: float) -> dict[str, Any]:
    good = sum(map(goals.met, records))
    return {
        "goals": dataclasses.asdict(goals),
        "requests": good,
        "share": good / len(records) if records else 0.0,
        "requests_per_second": good / seconds if seconds else 0.0,
    }


def _examples(records: Sequence[Record]) -> Mapping[str, str]:
    """Return one message of each kind of error."""
    found: dict[str, str] = {}
    for record in records:
        if record.error_kind is not None:
            found.setdefault(record.error_kind, record.error or "")
    return found


def _peak(records: Sequence[Record]) -> int:
    """Return the maximum number of requests in flight."""
    events = sorted([(record.sent, 1) for record in records] + [(record.ended, -1) for record in records])
    return int(np.cumsum([step for _, step in events]).max(initial=0))


def keeping_up(ended: Sequence[Record]) -> float | None:
    """Return the completion rate over the arrival rate: 1 if the server keeps up, less if its queue grows.

    Both rates are over the middle 80 %, so that ramp-up and tail do not count; None for fewer than ten requests.
    """
    if len(ended) < 10:
        return None
    came = np.subtract(*np.percentile([record.due for record in ended], (90, 10)))
    went = np.subtract(*np.percentile([record.ended for record in ended], (90, 10)))
    return float(came / went) if went > 0 else None
