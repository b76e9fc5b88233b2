"""The scheduler's only face to the KV cache: room for sequences, and their block tables. No jax."""

from __future__ import annotations

import math

import numpy as np

from jaxinfer.kv.blocks import BlockPool


class KVManager:
    """Pages of every slot. A sequence reserves all the pages it can ever need when it is admitted.

    ``tables[slot]`` lists the slot's pages in order; entries behind them are stale and never read, because lengths
    mask them.
    """

    def __init__(self, pages: int, page_size: int, rows: int, width: int) -> None:
        self.page_size = page_size
        self.tables = np.zeros((rows, width), np.int32)
        self._blocks = BlockPool(pages)
        self._pages: dict[int, list[int]] = {}

    @property
    def free_pages(self) -> int:
        return self._blocks.free

    def pages_for(self, tokens: int) -> int:
        return math.ceil(tokens / self.page_size)

    def has_room(self, tokens: int) -> bool:
        return self.pages_for(tokens) <= self._blocks.free

    def reserve(self, slot: int, tokens: int) -> None:
        """Take the pages of ``tokens`` tokens for ``slot``.

        Raises:
            OutOfPagesError: `has_room` was not asked.
        """
        pages = self._blocks.allocate(self.pages_for(tokens))
        self._pages[slot] = pages
        self.tables[slot, : len(pages)] = pages

    def release(self, slot: int) -> None:
        self._blocks.release(self._pages.pop(slot))

    def check(self) -> None:
        """Every page is free or in exactly one slot's table."""
        self._blocks.check()
        held = [page for pages in self._pages.values() for page in pages]
        if len(held) + self._blocks.free != self._blocks.total or len(set(held)) != len(held):
            raise AssertionError(f"{len(held)} pages in tables, {self._blocks.free} free, {self._blocks.total} in all")
        for slot, pages in self._pages.items():
            if self.tables[slot, : len(pages)].tolist() != pages:
                raise AssertionError(f"the table of slot {slot} does not list its pages")
