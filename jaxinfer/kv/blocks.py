"""Reference counts of the pages of a pool: free, in use or cached. Ids only, the bytes are on the device. No jax."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping


class OutOfPagesError(RuntimeError):
    """Allocation failure: no page is free."""


class BlockPool[Owner]:
    """Page ids 0 .. pages-1, each with a reference count and possibly an owner.

    A page with references is *in use* (`held`). A page without references is *cached* if it has an owner (its bytes are
    worth keeping) and *free* otherwise. Free pages are allocated last-freed first, so that a small working set stays in
    hardware caches; cached pages are in the order in which they lost their last reference. All operations are O(1), and
    pages that were never used cost nothing: a pool of host pages may be large.
    """

    def __init__(self, pages: int) -> None:
        self._total = self._unused = pages  # unused: never allocated
        self._free: list[int] = []  # free pages that were allocated before
        self._refs: list[int] = []
        self._owners: list[Owner | None] = []
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def total(self) -> int:
        return self._total

    @property
    def used(self) -> int:
        """Number of pages that were ever allocated: pages 0 .. used-1."""
        return len(self._refs)

    @property
    def free(self) -> int:
        return self._unused + len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def held(self) -> int:
        return self.used - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Number of pages that `take` can give: free pages, and cached pages once they are evicted."""
        return self.free + len(self._cached)

    def refs(self, page: int) -> int:
        return self._refs[page]

    def owner(self, page: int) -> Owner | None:
        return self._owners[page]

    def take(self) -> int:
        """Take a free page, with one reference.

        Raises:
            OutOfPagesError: no page is free.
        """
        if self._free:
            page = self._free.pop()
            self._refs[page] = 1
            return page
        if not self._unused:
            raise OutOfPagesError(f"none of {self.total} pages is free ({self.held} held, {self.cached} cached)")
        self._unused -= 1
        self._refs.append(1)
        self._owners.append(None)
        return self.used - 1

    def hold(self, page: int) -> None:
        """Add a reference to a page that is in use or cached."""
        if not self._refs[page]:
            if page not in self._cached:
                raise AssertionError(f"page {page} is free and cannot be held")
            del self._cached[page]
        self._refs[page] += 1

    def drop(self, page: int) -> None:
        """Remove a reference; without any left the page is cached or free."""
        if not self._refs[page]:
            raise AssertionError(f"page {page} is released but nobody holds it")
        self._refs[page] -= 1
        if not self._refs[page]:
            self._settle(page)

    def assign(self, page: int, owner: Owner) -> None:
        """Set the owner of a page in use: its bytes stay cached after the last reference."""
        if page >= self.used or not self._refs[page] or self._owners[page] is not None:
            raise AssertionError(f"page {page} is free or has an owner")
        self._owners[page] = owner

    def disown(self, page: int) -> None:
        """Remove the owner of a page; a cached page becomes free."""
        self._owners[page] = None
        if not self._refs[page]:
            del self._cached[page]
            self._free.append(page)

    def oldest(self) -> int:
        """Return the least recently used cached page."""
        return next(iter(self._cached))

    def touch(self, page: int) -> None:
        """Make a cached page the most recently used one."""
        if page in self._cached:
            self._cached.move_to_end(page)

    def _settle(self, page: int) -> None:
        if self._owners[page] is None:
            self._free.append(page)
        else:
            self._cached[page] = None

    def check(self, expected: Mapping[int, int]) -> None:
        """Raise AssertionError unless each page is free, cached or in use, with ``expected`` references."""
        free = set(self._free)
        if len(free) != len(self._free) or free & self._cached.keys():
            raise AssertionError("a page is free twice, or free and cached")
        for page, (refs, owner) in enumerate(zip(self._refs, self._owners, strict=True)):
            if refs != expected.get(page, 0):
                raise AssertionError(f"page {page} counts {refs} references, {expected.get(page, 0)} are known")
            if (page in free) != (not refs and owner is None):
                raise AssertionError(f"page {page} has {refs} references and owner {owner}, but free: {page in free}")
            if (page in self._cached) != (not refs and owner is not None):
                raise AssertionError(f"page {page}: {refs} references, owner {owner}, cached: {page in self._cached}")
        if (
            self._unused != self._total - self.used
            or self.free + self.held + self.cached != self.total
            or self.held != sum(count > 0 for count in expected.values())
        ):
            raise AssertionError(f"{self.free} free + {self.held} held + {self.cached} cached != {self.total} pages")
