"""Bounds of a trace: the gain of continuous over static batching, and the hits of an LRU prefix cache."""

from __future__ import annotations

import dataclasses
import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from jaxinfer.bench.traces import Trace, TraceRequest


@dataclasses.dataclass(frozen=True)
class BatchingBound:
    """Decode steps of batches of ``batch`` sequences with static batching (a batch runs until its longest sequence has
    ended) and with continuous batching (a sequence replaces an ended one at once).

    Attributes:
        static_steps: the sum over batches of the longest output.
        full_steps: all output tokens over the batch size: no row is ever idle.
        continuous_steps: steps for these outputs in this order, including the end, where rows become idle.
    """

    batch: int
    static_steps: int
    full_steps: float
    continuous_steps: int

    @classmethod
    def of(cls, outputs: Sequence[int], batch: int) -> BatchingBound:
        static = sum(max(outputs[start : start + batch]) for start in range(0, len(outputs), batch))
        return cls(batch, static, sum(outputs) / batch, _list_schedule(outputs, batch))

    @property
    def ratio(self) -> float:
        """Longest over mean output length of a batch: the mean over batches, each weighted by its work."""
        return self.static_steps / self.full_steps

    @property
    def ratio_here(self) -> float:
        """Ratio for a finite run: the gain of a perfect scheduler with these outputs."""
        return self.static_steps / self.continuous_steps


def _list_schedule(outputs: Sequence[int], batch: int) -> int:
    """Return the steps until the last of ``outputs`` has ended, each started in order in the first free slot."""
    ends = [0] * batch
    for output in outputs:
        heapq.heapreplace(ends, ends[0] + output)
    return max(ends)


@dataclasses.dataclass(frozen=True)
class LRUHits:
    """Prompt tokens looked up in an LRU cache, and the hits."""

    tokens: int
    hits: int

    @property
    def rate(self) -> float:
        return self.hits / self.tokens


class PageNames:
    """Names of pages, equal for pages with equal tokens before and in them: a prefix tree over blocks, flattened.

    A page is named by the block (with all blocks before it) in which it ends, and its position in the prompt.
    """

    def __init__(self, trace: Trace, page_size: int) -> None:
        self._trace, self._page_size = trace, page_size
        self._chains: dict[tuple[int, int], int] = {}

    def of(self, request: TraceRequest, tokens: int) -> list[tuple[int, int]]:
        """Return the names of the full pages among the first ``tokens`` of a prompt."""
        chains = list(self._chain(request))
        size, block = self._page_size, self._trace.block_tokens or request.prompt_len
        return [(chains[(end - 1) // block], end) for end in range(size, tokens + 1, size)]

    def _chain(self, request: TraceRequest) -> Iterator[int]:
        parent = -1
        for block in request.blocks:
            parent = self._chains.setdefault((parent, block), len(self._chains))
            yield parent


def lru_hits(trace: Trace, page_size: int, pages: int) -> LRUHits:
    """Serve the prompts in order from a cache of ``pages`` pages that evicts the least recently used leaf. Only full
    pages are kept, and the last token of a prompt is always computed."""
    names, cached = PageNames(trace, page_size), OrderedDict[tuple[int, int], None]()
    queries = hits = 0
    for request in trace.requests:
        path = names.of(request, request.prompt_len)
        queries += request.prompt_len - 1
        usable = (request.prompt_len - 1) // page_size
        hits += page_size * next((i for i, page in enumerate(path[:usable]) if page not in cached), usable)
        for page in reversed(path):  # the first page is used last, so that a leaf is always older than its ancestors
            cached[page] = None
            cached.move_to_end(page)
        while len(cached) > pages:
            cached.popitem(last=False)
    return LRUHits(queries, hits)


def unique_pages(trace: Trace, page_size: int) -> int:
    """Count the different full pages in all prompts."""
    names = PageNames(trace, page_size)
    return len({page for request in trace.requests for page in names.of(request, request.prompt_len)})
