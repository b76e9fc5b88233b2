"""Page moves collected for the next step. No jax."""

from __future__ import annotations

from jaxinfer.kv.blocks import BlockPool
from jaxinfer.kv.page_copies import Copy, Export, Import, Pages
from jaxinfer.kv.radix import Node


class PendingMoves:
    """Moves since the last `take`. The device runs all exports, then all copies, then all imports, then the step.

    Within one batch a page may be freed and allocated again. That is safe because exports and copies read the contents
    of a page from before the batch, and because the batch itself holds a reference to the pages that it writes and to
    the host pages that it reads: these are not reallocated before it has run. So no page is the target of two moves,
    and copies may run in any order or all at once.
    """

    def __init__(self) -> None:
        self.batch = 0
        self._exports: dict[int, Pages] = {}  # by host page: a later export to the same page replaces the earlier
        self._copies: list[Copy] = []
        self._imports: list[Import] = []
        self._pins: list[tuple[BlockPool[Node], int]] = []
        self._written: set[tuple[int, int]] = set()

    def arrives(self, group: int, page: int) -> bool:
        """Return whether a pending move writes a device page."""
        return (group, page) in self._written

    def export_page(self, source: Pages, host: int) -> None:
        self._exports[host] = source

    def copy_page(self, source: Pages, target: Pages, pools: list[BlockPool[Node]]) -> None:
        self._copies.append(Copy(source, target))
        self._pin_targets(target, pools)

    def import_page(self, host: int, target: Pages, pools: list[BlockPool[Node]]) -> None:
        """Import a host page that the caller has pinned with `pin`."""
        self._imports.append(Import(host, target))
        self._pin_targets(target, pools)

    def pin(self, pool: BlockPool[Node], page: int) -> None:
        """Reference a page until the batch is taken."""
        pool.hold(page)
        self._pins.append((pool, page))

    def _pin_targets(self, target: Pages, pools: list[BlockPool[Node]]) -> None:
        for group, page in enumerate(target):
            if page >= 0:
                self.pin(pools[group], page)
                self._written.add((group, page))

    def take(self, host: BlockPool[Node]) -> tuple[list[Export], list[Copy], list[Import]]:
        """Take the moves of this batch and begin the next. Exports to host pages that are free again are left out."""
        exports = [
            Export(source, at) for at, source in self._exports.items() if host.refs(at) or host.owner(at) is not None
        ]
        taken = exports, self._copies, self._imports
        for pool, page in reversed(self._pins):  # children were pinned after their parents and are evicted first
            pool.drop(page)
        self._exports, self._copies, self._imports, self._pins = {}, [], [], []
        self._written.clear()
        self.batch += 1
        return taken

    def references(self, pool: BlockPool[Node]) -> list[int]:
        """Return the pages of a pool that the batch references."""
        return [page for other, page in self._pins if other is pool]
