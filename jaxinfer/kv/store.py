"""Device pages of all groups, host pages, and the prefix cache over both with its eviction. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxinfer.kv.blocks import BlockPool
from jaxinfer.kv.radix import Node, PageKey, PageKeys, RadixTree
from jaxinfer.types import STATE

Pages = tuple[int, ...]
"""Physical pages of one page of a sequence, one in each cache group; -1 where it slid out of a group's window."""


class Export(NamedTuple):
    """Device pages to copy to a page in host memory."""

    source: Pages
    host: int


class Copy(NamedTuple):
    """Device pages to copy to other device pages."""

    source: Pages
    target: Pages


class Import(NamedTuple):
    """A page in host memory to copy to device pages."""

    host: int
    target: Pages


@dataclasses.dataclass(frozen=True)
class Match:
    """A cached prefix, valid until a page is evicted.

    Attributes:
        tokens: its length; full pages first, then possibly the head of one more page, which is copied.
        nodes: the full pages.
        donor: the node of the page whose head is copied.
        changes: value of `RadixTree.changes` when the match was made.
    """

    tokens: int = 0
    nodes: tuple[Node, ...] = ()
    donor: Node | None = None
    changes: int = -1


class PageStore:
    """Pools, radix tree and pending moves, kept consistent with each other.

    Eviction takes the least recently used page. In a group without a window a sequence references all pages of its path
    and releases the last one first, so the evicted page is a leaf of the rest; its node is evicted as a whole, to a
    host page if there are any. A page of a windowed group can be evicted alone: the nodes below it may match without
    it.

    In one case a node without its page is above nodes that have theirs: a fork still uses pages that its parent has
    published under another sequence's equal pages. They match again when a sequence publishes what is missing.

    Pages of the group of states (`jaxinfer.types.STATE`) are few: a node has one only where a sequence has stored its
    state. They are evicted alone, like the pages of a window.

    A node keeps its host copy after it is loaded to the device, until the host page is needed: evicting it again is
    free.
    """

    def __init__(
        self, pages: int, page_size: int, windows: tuple[int | None, ...], host_pages: int, states: int = 0
    ) -> None:
        self.page_size = page_size
        self.windows = windows
        self.pools: list[BlockPool[Node]] = [BlockPool(states if window == STATE else pages) for window in windows]
        self.host: BlockPool[Node] = BlockPool(host_pages)
        self.tree = RadixTree(len(windows), page_size)
        self.moves = PendingMoves()

    def first_visible(self, group: int, position: int) -> int:
        """Return the first page that a query at ``position`` sees: neither it nor later queries use earlier pages."""
        window = self.windows[group]
        if window == STATE:  # the query reads the state after the preceding token
            return max(0, position - 1) // self.page_size
        return 0 if window is None else max(0, position - window + 1) // self.page_size

    # ---- pages

    def has_room(self, needs: Sequence[int]) -> bool:
        """Return whether each group has ``needs[group]`` free or cached pages."""
        return all(need <= pool.available for need, pool in zip(needs, self.pools, strict=True))

    def take(self, group: int) -> int:
        """Take a page, evicting one if none is free. The caller has checked `has_room`."""
        pool = self.pools[group]
        if not pool.free and pool.cached:
            self._evict(group)
        return pool.take()

    def hold(self, group: int, page: int) -> None:
        if page >= 0:
            self.pools[group].hold(page)

    def drop(self, group: int, page: int) -> None:
        if page >= 0:
            self.pools[group].drop(page)

    def _evict(self, group: int) -> None:
        node = self._owner(self.pools[group], self.pools[group].oldest())
        if self.windows[group] is not None and any(page >= 0 for page in node.pages[:group] + node.pages[group + 1 :]):
            self._unload(node, group)
        else:
            self._offload(node)
            for other in range(len(self.pools)):
                self._unload(node, other)
        self.tree.prune(node)

    def _unload(self, node: Node, group: int) -> None:
        if node.pages[group] >= 0:
            self.pools[group].disown(node.pages[group])
            node.pages[group] = -1
            self.tree.touch(node)

    @staticmethod
    def _owner(pool: BlockPool[Node], page: int) -> Node:
        node = pool.owner(page)
        assert node is not None  # a page without an owner is free, not cached
        return node

    # ---- host pages

    def take_host(self, count: int) -> list[int] | None:
        """Take host pages, evicting cached ones if need be; None, with no change, if there are too few."""
        if count > self.host.available:
            return None
        while self.host.free < count:
            self._forget(self._owner(self.host, self.host.oldest()))
        return [self.host.take() for _ in range(count)]

    def _offload(self, node: Node) -> None:
        """Export the bytes of a node that is evicted from the device to a host page, if one is available."""
        present = tuple(page >= 0 for page in node.pages)
        if node.host >= 0 and all(
            stored or not on_device for stored, on_device in zip(node.stored, present, strict=True)
        ):
            self.host.touch(node.host)
            return
        if node.host >= 0:
            self._forget(node)
        taken = self.take_host(1)
        if taken is None:
            return
        (node.host,), node.stored = taken, present
        self.host.assign(node.host, node)
        self.tree.touch(node)
        self.moves.export_page(tuple(node.pages), node.host)
        self.host.drop(node.host)

    def _forget(self, node: Node) -> None:
        """Free the host copy of a node."""
        self.host.disown(node.host)
        node.host = -1
        self.tree.touch(node)
        self.tree.prune(node)

    # ---- prefix hits

    def hit_needs(self, nodes: Sequence[Node], firsts: Sequence[int]) -> list[int]:
        """Return the pages per group that `hold_path` takes: missing ones, and cached ones, no longer evictable."""
        return [
            sum(node.pages[group] < 0 or not pool.refs(node.pages[group]) for node in nodes[firsts[group] :])
            for group, pool in enumerate(self.pools)
        ]

    def hold_path(self, nodes: Sequence[Node], firsts: Sequence[int]) -> list[list[int]]:
        """Reference the pages of a path, [group][page], from ``firsts[group]`` on (-1 before), on the device.

        Pages that are only on the host are imported. All are referenced first, so that none is evicted to load another.
        """
        wanted = [[group for group, first in enumerate(firsts) if index >= first] for index in range(len(nodes))]
        for node, groups in zip(nodes, wanted, strict=True):
            for group in groups:
                self.hold(group, node.pages[group])
        self._load_missing(nodes, wanted)
        return [
            [-1] * min(first, len(nodes)) + [node.pages[group] for node in nodes[first:]]
            for group, first in enumerate(firsts)
        ]

    def _load_missing(self, nodes: Sequence[Node], wanted: list[list[int]]) -> None:
        absent = [
            [group for group in groups if node.pages[group] < 0] for node, groups in zip(nodes, wanted, strict=True)
        ]
        if not any(absent):
            return
        for node, groups, gone in zip(nodes, wanted, absent, strict=True):
            # Also pages on the device: until the batch has run, no node may be half exported or lose its parent.
            for group in set(groups).difference(gone):
                self.moves.pin(self.pools[group], node.pages[group])
            if gone:
                self.moves.pin(self.host, node.host)
        for node, gone in zip(nodes, absent, strict=True):
            if gone:
                self._load(node, gone)

    def _load(self, node: Node, groups: list[int]) -> None:
        target = [-1] * len(self.pools)
        for group in groups:
            page = target[group] = node.pages[group] = self.take(group)
            self.pools[group].assign(page, node)
        self.tree.touch(node)
        self.moves.import_page(node.host, tuple(target), self.pools)

    def donor_source(self, node: Node) -> Pages | int | None:
        """Return the source to copy all groups of a node in the next batch: device pages, a host page, or None."""
        if all(page >= 0 and not self.moves.arrives(group, page) for group, page in enumerate(node.pages)):
            return tuple(node.pages)
        return node.host if node.host >= 0 and all(node.stored) else None

    def enter(self, parent: Node, key: PageKey, pages: list[int]) -> Node | None:
        """Enter a full page of a sequence, ``pages[group]`` (-1: none), into the tree.

        Where the tree has an equal page already, the entry of ``pages`` is changed to it. None if a page is in the tree
        under another key.
        """
        node = parent.children.get(key)
        for group, page in enumerate(pages):
            owner = self.pools[group].owner(page) if page >= 0 else None
            if owner is not None and owner is not node:
                return None
        node = self.tree.add(parent, key) if node is None else node
        self.tree.touch(node)
        for group, page in enumerate(pages):
            if page >= 0 and page != node.pages[group]:
                pages[group] = self._merge(node, group, page)
        return node

    def _merge(self, node: Node, group: int, page: int) -> int:
        known = node.pages[group]
        if known < 0:
            self.pools[group].assign(page, node)
            node.pages[group] = page
            return page
        self.hold(group, known)
        self.drop(group, page)
        return known

    def clear(self) -> int:
        """Remove every page from the tree, on the device and on the host; return the number of nodes that had one.

        A referenced page stays with its holders, and is free after the last release. No node may be pinned.
        """
        nodes = list(self.tree.nodes())
        found = sum(not node.empty for node in nodes)
        for node in nodes:
            for group in range(len(self.pools)):
                self._unload(node, group)
            if node.host >= 0:
                self.host.disown(node.host)
                node.host = -1
        self.tree.clear()
        return found


def find_prefix(store: PageStore, keys: PageKeys, codes: Sequence[int], limit: int) -> Match:
    """Find the longest prefix of ``keys.tokens[:limit]`` whose pages are cached under ``codes``. Changes no state.

    Args:
        codes: code of each page of the sequence: the programs that would compute it.
        limit: maximum tokens to match.
    """
    limit, size = min(limit, len(keys.tokens)), store.page_size
    root = store.tree.root(keys.namespace)
    if root is None or limit <= 0:
        return Match()
    nodes = _path(store, root, keys, codes, limit // size)
    nodes = nodes[: _covered(store, nodes)]
    start = len(nodes) * size
    donor, head = None, 0
    if start < limit and STATE not in store.windows:  # a state is only stored at the end of a page
        end, parent = min(limit, start + size), nodes[-1] if nodes else root
        donor, head = store.tree.closest(
            parent,
            codes[len(nodes)],
            keys.range_bytes(start, end),
            end - start,
            lambda node: store.donor_source(node) is not None,
        )
    return Match(start + head, tuple(nodes), donor, store.tree.changes)


def _path(store: PageStore, root: Node, keys: PageKeys, codes: Sequence[int], pages: int) -> list[Node]:
    """Return the nodes from the root down with matching keys and with pages in all groups without a window."""
    whole = [group for group, window in enumerate(store.windows) if window is None]
    node, path = root, []
    for page in range(pages):
        child = node.children.get((codes[page], keys.page_bytes(page)))
        if child is None or not all(child.has(group) for group in whole):
            break
        path.append(child)
        node = child
    return path


def _covered(store: PageStore, nodes: list[Node]) -> int:
    """Return the most leading nodes after which a query finds every page that its windows see."""
    windowed = [group for group, window in enumerate(store.windows) if window is not None]
    if not windowed:
        return len(nodes)
    runs, best = dict.fromkeys(windowed, 0), 0
    for count, node in enumerate(nodes, 1):
        for group in windowed:
            runs[group] = runs[group] + 1 if node.has(group) else 0
        if all(run >= count - store.first_visible(group, count * store.page_size) for group, run in runs.items()):
            best = count
    return best


def check_tree(store: PageStore) -> None:
    """Raise AssertionError unless tree and pools agree on which node has which page."""
    nodes = list(store.tree.nodes())
    for group, pool in enumerate(store.pools):
        _check_owned(pool, {node.pages[group]: node for node in nodes if node.pages[group] >= 0})
    _check_owned(store.host, {node.host: node for node in nodes if node.host >= 0})


def _check_owned(pool: BlockPool[Node], known: dict[int, Node]) -> None:
    if {page: owner for page in range(pool.used) if (owner := pool.owner(page)) is not None} != known:
        raise AssertionError("the tree and a pool do not agree on which pages are cached")


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
