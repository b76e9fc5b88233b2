"""A heap with removal and reordering of arbitrary entries. No jax."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Any

_SLACK = 64  # dead entries that a heap may always keep


class Heap[K: Hashable, V]:
    """Values under distinct keys, least order first. Removal is lazy: O(1), entries are dropped when they surface."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, K]] = []  # order, version, key
        self._live: dict[K, tuple[int, V]] = {}
        self._versions = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: K) -> bool:
        return key in self._live

    def values(self) -> Iterator[V]:
        return (value for _, value in self._live.values())

    def put(self, key: K, order: Any, value: V) -> None:
        """Insert a value, or replace the value and order of ``key``."""
        self._versions += 1
        self._live[key] = (self._versions, value)
        heapq.heappush(self._entries, (order, self._versions, key))
        self._compact()

    def discard(self, key: K) -> None:
        self._live.pop(key, None)
        self._compact()

    def first(self) -> tuple[Any, V] | None:
        """Return the least order and its value."""
        while self._entries:
            order, version, key = self._entries[0]
            if (live := self._live.get(key)) is not None and live[0] == version:
                return order, live[1]
            heapq.heappop(self._entries)
        return None

    def _compact(self) -> None:
        """Drop dead entries, so that they never outnumber live ones by much: amortised constant cost per removal."""
        if len(self._entries) > 2 * len(self._live) + _SLACK:
            live = {version for version, _ in self._live.values()}
            self._entries = [entry for entry in self._entries if entry[1] in live]
            heapq.heapify(self._entries)
