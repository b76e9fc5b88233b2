"""Acceptance of a server's draft tokens during a run, from the counters of its /metrics before and after."""

from __future__ import annotations

import asyncio
import ssl
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.bench.target import Access, TargetError

_PREFIX = "spec_decode_num_"  # preceded by the prefix of the engine: vllm:, jaxinfer:
_PER_PLACE = "accepted_tokens_per_pos"
_MOST = 16 << 20  # maximum bytes of a page
WIDTH = 30  # characters of a bar


class Counters(NamedTuple):
    """Counts since the server's start: verified drafts, their tokens, accepted tokens, also by position."""

    drafts: float
    tokens: float
    accepted: float
    places: Mapping[int, float]


def read(page: str) -> Counters | None:
    """Parse the counters of a page in Prometheus' text format, summed over models; None: it has none.

    Raises:
        ValueError: the page is invalid.
    """
    sums, places = dict[str, float](), dict[int, float]()
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    for sample in samples:
        _, found, name = sample.name.rpartition(_PREFIX)
        if found and name == f"{_PER_PLACE}_total":
            place = int(sample.labels["position"])
            places[place] = places.get(place, 0.0) + sample.value
        elif found:
            sums[name] = sums.get(name, 0.0) + sample.value
    drafts, tokens, accepted = (sums.get(f"{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens"))
    return None if drafts is None else Counters(drafts, tokens or 0.0, accepted or 0.0, places)


def between(before: Counters | None, after: Counters | None) -> dict[str, Any] | None:
    """Return the statistics of drafts between two readings; None: no drafts, or the server was restarted."""
    if before is None or after is None or after.drafts <= before.drafts:
        return None
    drafts = after.drafts - before.drafts
    accepted = [after.places[place] - before.places.get(place, 0.0) for place in sorted(after.places)]
    return {
        "drafts": int(drafts),
        "draft_tokens": int(after.tokens - before.tokens),
        "accepted": int(after.accepted - before.accepted),
        "acceptance_length": 1 + (after.accepted - before.accepted) / drafts,
        "accepted_by_place": [count / drafts for count in accepted],
    }


def lines(figures: Mapping[str, Any] | None) -> list[str]:
    """Return the lines of the report: a bar for each draft position, with the share of drafts accepted up to it."""
    if figures is None:
        return []
    each = figures["draft_tokens"] / figures["drafts"]
    shares = figures["accepted_by_place"]
    last = max((place for place, share in enumerate(shares) if share > 0), default=-1)
    return [
        f"drafts        {figures['drafts']} of {each:.2f} tokens, {figures['accepted']} accepted: mean acceptance "
        f"length {figures['acceptance_length']:.2f}",
        *(f"  place {place + 1:<6}{_bar(share)} {share:.0%}" for place, share in enumerate(shares[: last + 1])),
    ]


def _bar(share: float) -> str:
    return f"{'█' * round(WIDTH * share):<{WIDTH}}"


class Watched:
    """Metrics page of a server.

    Args:
        url: URL of the page; None: that of an HTTP target, whose absence is not an error.
    """

    def __init__(self, access: Access, url: str | None) -> None:
        self._access, self._asked = access, url is not None
        at = urllib.parse.urlsplit(access.url)
        own = f"{at.scheme}://{at.netloc}/metrics" if at.scheme.startswith("http") else None
        self._url = url or own

    async def counters(self) -> Counters | None:
        """Return the current counters; None: there are none.

        Raises:
            TargetError: an explicitly given page cannot be read.
        """
        if self._url is None:
            return None
        try:
            return read(await asyncio.to_thread(self._page))
        except (OSError, ValueError, KeyError) as cause:
            if not self._asked:
                return None
            raise TargetError(f"{self._url} is no page of metrics: {cause}") from cause

    def _page(self) -> str:
        assert self._url is not None
        key, ca = self._access.api_key, self._access.ca
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        context = ssl.create_default_context(cadata=ca.decode("ascii")) if ca is not None else None
        request = urllib.request.Request(self._url, headers=headers)
        with urllib.request.urlopen(request, timeout=self._access.connect_timeout, context=context) as response:
            page: bytes = response.read(_MOST)
        return page.decode("utf-8")
