"""Which pages of the pool are free and which are held. Ids only: the bytes are the device's business. No jax."""

from __future__ import annotations


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free."""


class BlockPool:
    """Page ids 0 .. pages-1, handed out last-freed first so that a small working set stays in cache.

    Invariant (`check`): every page is free or held by exactly one owner.
    """

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages - 1, -1, -1))
        self._held = [False] * pages

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def total(self) -> int:
        return len(self._held)

    def allocate(self, count: int) -> list[int]:
        """``count`` page ids.

        Raises:
            OutOfPagesError: fewer are free; nothing is taken.
        """
        if count > len(self._free):
            raise OutOfPagesError(f"{count} pages asked for, {len(self._free)} of {len(self._held)} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._held[page] = True
        return pages

    def release(self, pages: list[int]) -> None:
        for page in pages:
            if not self._held[page]:
                raise AssertionError(f"page {page} is released but nobody holds it")
            self._held[page] = False
        self._free.extend(reversed(pages))

    def check(self) -> None:
        """Raises AssertionError unless free + held = total and no page is in both."""
        if len(set(self._free)) != len(self._free):
            raise AssertionError("a page is free twice")
        if any(self._held[page] for page in self._free):
            raise AssertionError("a free page is held")
        if len(self._free) + sum(self._held) != len(self._held):
            raise AssertionError(f"{len(self._free)} free + {sum(self._held)} held != {len(self._held)} pages")
