"""KV cache manager, the scheduler's interface to pages and tables of sequences and to the prefix cache. No jax."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jaxinfer.kv.journal import Journal
from jaxinfer.kv.radix import Node, PageKeys
from jaxinfer.kv.store import Copy, Export, Import, Match, Pages, PageStore, check_tree, find_prefix
from jaxinfer.types import NO_STATE, STATE


@dataclasses.dataclass(frozen=True)
class KVConfig:
    """Sizes of the cache.

    Attributes:
        pages: pages of each group.
        page_size: tokens per page.
        slots: sequences that run at once, and forks of them.
        width: maximum pages of one sequence.
        windows: sliding window of each group in tokens; None: full attention; `STATE`: the group of recurrent states.
        states: pages of that group.
        host_pages: pages in host memory, for swapped sequences and evicted pages.
        prefix_caching: whether pages outlive their sequences and are shared with later ones.
    """

    pages: int
    page_size: int
    slots: int
    width: int
    windows: tuple[int | None, ...] = (None,)
    host_pages: int = 0
    prefix_caching: bool = True
    states: int = 0


@dataclasses.dataclass(frozen=True)
class KVUsage:
    """Pages of the group with fewest left: free + cached + held (in use) = total. Host pages: swapped and cached."""

    total: int
    free: int
    cached: int
    held: int
    host_total: int
    host_used: int


@dataclasses.dataclass(frozen=True, eq=False)
class Swapped:
    """Pages of a swapped sequence in host memory, in order. Group g has none before page ``firsts[g]``; ``era``: see
    `SlotPages`."""

    hosts: tuple[int, ...]
    firsts: tuple[int, ...]
    era: int


@dataclasses.dataclass(slots=True)
class SlotPages:
    """Pages of a slot: ``pages[group][page]``; -1 before ``firsts[group]``, and in the group of states where no state
    is stored.

    The first ``published`` pages are in the radix tree; ``cursor`` is the node of the last of them. The first
    ``sealed`` pages are full, no longer written, and may be shared. ``born`` is the batch in which the slot was filled.
    ``era`` is the number of prefix cache resets before its first token was computed: pages of an earlier era are not
    shared with new sequences.
    """

    pages: list[list[int]]
    firsts: list[int]
    cursor: Node | None
    published: int
    sealed: int
    born: int
    era: int

    @property
    def count(self) -> int:
        return len(self.pages[0])


class KVManager:
    """Pages of all slots, and the cached pages.

    ``tables[group, slot]`` lists a slot's pages in order. Entries after them are stale and never read, because lengths
    mask them; entries of pages that slid out of a window are 0 and masked by the window.

    The next call may allocate pages that this call freed: the moves that this needs are collected until `take_moves`. A
    token that is published (cached), forked or swapped must have been computed by a step launched before.
    """

    tables: Int[np.ndarray, "groups slots width"]

    def __init__(self, config: KVConfig) -> None:
        self.config = config
        self.tables = np.zeros((len(config.windows), config.slots, config.width), np.int32)
        self._store = PageStore(config.pages, config.page_size, config.windows, config.host_pages, config.states)
        self._counts = np.zeros(config.slots, np.int32)
        self._slots: dict[int, SlotPages] = {}
        self._swapped: set[Swapped] = set()
        self._era = 0
        self._groups = range(len(config.windows))
        self._windowed = [group for group in self._groups if config.windows[group] is not None]
        self._state = config.windows.index(STATE) if STATE in config.windows else None
        self._absent = [NO_STATE if group == self._state else 0 for group in self._groups]
        self._pools = [pool for group, pool in enumerate(self._store.pools) if group != self._state]

    # ---- usage

    @property
    def available(self) -> int:
        """Free and cached pages in the group that has fewest, not counting the group of states."""
        return min(pool.available for pool in self._pools)

    def usage(self) -> KVUsage:
        pool, host = min(self._pools, key=lambda pool: pool.available), self._store.host
        return KVUsage(pool.total, pool.free, pool.cached, pool.held, host.total, host.total - host.free)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    # ---- pages of a sequence

    def match(self, keys: PageKeys, codes: Sequence[int], limit: int) -> Match:
        """Find the longest cached prefix of ``keys.tokens[:limit]``; page i must be cached under ``codes[i]``.

        The head of one more page counts too: its tokens are copied. A code is ``class * (page_size + 1) + split``:
        ``split`` tokens of the page are computed by prefill programs of that class, the others by decode rows. So ``n``
        tokens may be copied from a page of the same class if neither split is less than ``n``, or if the codes are
        equal. Takes no reference: the match is valid until the next call that takes pages.
        """
        return find_prefix(self._store, keys, codes, limit) if self.config.prefix_caching else Match()

    def admit(self, slot: int, match: Match | None, length: int) -> bool:
        """Give an empty slot the pages of ``match`` and fresh pages, for ``length`` tokens in total.

        Returns:
            False, with no change, if there are too few pages even after eviction.

        Raises:
            AssertionError: the slot is in use, or a page was evicted since the match was made.
            ValueError: ``length`` is beyond the width of the tables.
        """
        hit = match or Match()
        self._require_empty(slot)
        if hit.tokens and hit.changes != self._store.tree.changes:
            raise AssertionError("pages were evicted since the match was made")
        nodes, store = hit.nodes, self._store
        length = max(length, hit.tokens)
        fresh = self._pages_to(length) - len(nodes)
        firsts = [min(store.first_visible(group, hit.tokens), len(nodes)) for group in self._groups]
        source = None if hit.donor is None else store.donor_source(hit.donor)
        if hit.donor is not None and source is None:
            return False
        needs = zip(store.hit_needs(nodes, firsts), self._needs(fresh, length), strict=True)
        if not store.has_room([held + new for held, new in needs]):
            return False
        entry = self._new(firsts, nodes[-1] if nodes else None, len(nodes))
        if isinstance(source, int):
            store.moves.pin(store.host, source)
        entry.pages = store.hold_path(nodes, firsts)
        self._grow(slot, entry, fresh, length)
        if source is not None:
            self._copy(source, entry, len(nodes))
        return True

    def extend(self, slot: int, length: int) -> bool:
        """Grow a slot to ``length`` tokens; False, with no change, without enough pages. O(1) if no page is needed.

        Raises:
            ValueError: ``length`` is beyond the width of the tables.
        """
        if length <= self._counts[slot] * self.config.page_size:
            return True
        entry = self._slots[slot]
        more = self._pages_to(length) - entry.count
        if not self._store.has_room(self._needs(more, length)):
            return False
        self._grow(slot, entry, more, length)
        return True

    def slide(self, slot: int, length: int) -> None:
        """Release pages that no query of the slot at ``length`` or later sees. Launch earlier queries before."""
        entry = self._slots[slot]
        for group in self._windowed:
            first, end = entry.firsts[group], min(self._store.first_visible(group, length), entry.count)
            for page in range(first, end):
                self._store.drop(group, entry.pages[group][page])
                entry.pages[group][page] = -1
            if end > first:
                self.tables[group, slot, first:end] = self._absent[group]
                entry.firsts[group] = end

    def fork(self, parent: int, child: int, length: int) -> bool:
        """Share the full pages of the parent's first ``length`` tokens with an empty slot; a partial page is copied.

        Returns:
            False, with no change, if there are too few pages, if the parent has released pages that the child's windows
            see, or if the partial page is not written before the next step: the parent was filled in this batch, or was
            merged with an equal page that was. Also False with recurrent states, unless one is stored exactly at
            ``length``: the parent has overwritten the state of a partial page.
        """
        self._require_empty(child)
        source = self._slots[parent]
        full, rest = divmod(length, self.config.page_size)
        firsts = [min(self._store.first_visible(group, length), full) for group in self._groups]
        if any(have > need for have, need in zip(source.firsts, firsts, strict=True)):
            return False
        if (rest and not self._may_copy(source, full)) or not self._has_state(source, length):
            return False
        cursor, published = self._cursor_at(source, full)
        source.sealed = max(source.sealed, full)
        entry = self._new(firsts, cursor, published, source.era)
        entry.sealed = full
        entry.pages = [[-1] * first + pages[first:full] for first, pages in zip(firsts, source.pages, strict=True)]
        for group in self._groups:
            for page in entry.pages[group]:
                self._store.hold(group, page)
        self._grow(child, entry, bool(rest), length)
        if rest:
            self._copy(tuple(pages[full] for pages in source.pages), entry, full)
        return True

    def _has_state(self, source: SlotPages, length: int) -> bool:
        """Whether the state after ``length`` tokens is still stored, or there are no states."""
        full, rest = divmod(length, self.config.page_size)
        return self._state is None or not length or (not rest and source.pages[self._state][full - 1] >= 0)

    def _may_copy(self, source: SlotPages, index: int) -> bool:
        """Whether a page can be copied in this batch: no move of the batch writes it, and there are free pages."""
        moves, pages = self._store.moves, [pages[index] for pages in source.pages]
        comes = source.born == moves.batch or any(moves.arrives(*place) for place in enumerate(pages))
        return not comes and self._store.has_room([1] * len(pages))

    def adopt(self, slot: int, other: int) -> None:
        """Exchange the pages of two slots in use: ``slot`` continues with the pages that its fork has computed."""
        held, counts = self._slots, self._counts
        held[slot], held[other] = held[other], held[slot]
        counts[slot], counts[other] = counts[other], counts[slot]
        self.tables[:, [slot, other]] = self.tables[:, [other, slot]]

    def release(self, slot: int) -> None:
        """Release a slot's pages. Published pages stay cached."""
        entry = self._slots.pop(slot)
        self._counts[slot] = 0
        for group, pages in enumerate(entry.pages):
            for page in reversed(pages):  # the last page is evicted first
                self._store.drop(group, page)
        self._move_cursor(entry, None)

    # ---- prefix cache

    def publish(self, slot: int, keys: PageKeys, codes: Sequence[int], length: int) -> None:
        """Enter the full pages of the first ``length`` tokens into the radix tree. Pages entered before cost nothing.

        Where the tree has an equal page, the slot's table switches to it and the slot's own page is freed. No effect
        for a slot filled in this batch, which has computed nothing yet, or before `reset_prefix_cache`.
        """
        entry = self._slots[slot]
        end = min(length // self.config.page_size, entry.count)
        barred = not self.config.prefix_caching or entry.era != self._era
        if barred or entry.published >= end or entry.born == self._store.moves.batch:
            return
        node = entry.cursor or self._store.tree.plant(keys.namespace)
        while entry.published < end:
            index = entry.published
            pages = [group[index] for group in entry.pages]
            entered = self._store.enter(node, (codes[index], keys.page_bytes(index)), pages)
            if entered is None:
                break
            node = entered
            self._replace(slot, entry, index, pages)
            entry.published += 1
        entry.sealed = max(entry.sealed, entry.published)
        if entry.published:
            self._move_cursor(entry, node)
        else:
            self._store.tree.prune(node)

    def start_journal(self) -> Journal:
        """Start recording changes of cached pages; to be called before any sequence is admitted."""
        return Journal(self._store)

    def stop_caching(self) -> None:
        """Turn the prefix cache off; to be called before any sequence is admitted."""
        self.config = dataclasses.replace(self.config, prefix_caching=False)

    def reset_prefix_cache(self) -> int:
        """Drop every cached page, on the device and on the host; return the number of pages dropped.

        Running and swapped sequences keep their pages, but no new sequence can match them, nor pages that they compute
        later. Pages without references are free at once.
        """
        self._era += 1
        for entry in self._slots.values():
            entry.cursor, entry.published = None, 0
        return self._store.clear()

    # ---- swapping

    def swap_out(self, slot: int, length: int) -> Swapped | None:
        """Move the pages of the first ``length`` tokens to the host and release the slot.

        Returns:
            None, with no change, if there are too few host pages, or if moves of this batch still write pages of the
            slot.
        """
        entry, count, moves = self._slots[slot], self.pages_for(length), self._store.moves
        pages = [tuple(pages[index] for pages in entry.pages) for index in range(count)]
        if entry.born == moves.batch or any(moves.arrives(*place) for page in pages for place in enumerate(page)):
            return None
        hosts = self._store.take_host(count)
        if hosts is None:
            return None
        for source, host in zip(pages, hosts, strict=True):
            moves.export_page(source, host)
        swapped = Swapped(tuple(hosts), tuple(min(first, count) for first in entry.firsts), entry.era)
        self._swapped.add(swapped)
        self.release(slot)
        return swapped

    def swap_in(self, slot: int, swapped: Swapped) -> bool:
        """Give an empty slot its pages back; False, with no change, if there are too few pages."""
        self._require_empty(slot)
        count, store = len(swapped.hosts), self._store
        if not store.has_room([count - first for first in swapped.firsts]):
            return False
        entry = self._new(list(swapped.firsts), None, 0, swapped.era)
        self._grow(slot, entry, count, count * self.config.page_size)
        for index, host in enumerate(swapped.hosts):
            store.moves.pin(store.host, host)
            store.moves.import_page(host, tuple(pages[index] for pages in entry.pages), store.pools)
        self.drop(swapped)
        return True

    def drop(self, swapped: Swapped) -> None:
        """Free the host pages of a swapped sequence that is not resumed."""
        self._swapped.remove(swapped)
        for host in swapped.hosts:
            self._store.host.drop(host)

    def take_moves(self) -> tuple[list[Export], list[Copy], list[Import]]:
        """Take the moves since the last call: the device runs all exports, all copies, all imports, then the step.

        No page is the target of two moves of one call, and a copy reads its source as it was before the moves: copies
        may run in order or all at once.
        """
        return self._store.moves.take(self._store.host)

    # ---- internals

    def check(self) -> None:
        """Raise AssertionError unless every page and every reference is accounted for.

        In each group and on the host free + in use + cached = total; references are those of slots, of swapped
        sequences and of pending moves; the tree and the pools agree; and a page that is shared or cached is full: no
        sequence writes to it next.
        """
        store = self._store
        store.tree.check()
        for group, pool in enumerate(store.pools):
            referenced = [page for slot in self._slots.values() for page in slot.pages[group] if page >= 0]
            pool.check(Counter([*referenced, *store.moves.references(pool)]))
        swapped = [host for swapped in self._swapped for host in swapped.hosts]
        store.host.check(Counter([*swapped, *store.moves.references(store.host)]))
        check_tree(store)
        pins = Counter(entry.cursor for entry in self._slots.values() if entry.cursor is not None)
        if any(node.pins != pins[node] for node in store.tree.nodes()):
            raise AssertionError("a node is pinned by another number of slots than end at it")
        for slot, entry in self._slots.items():
            self._check_slot(slot, entry)

    def _check_slot(self, slot: int, entry: SlotPages) -> None:
        if self._counts[slot] != entry.count or not entry.published <= entry.sealed <= entry.count:
            raise AssertionError(
                f"slot {slot}: {entry.published} published, {entry.sealed} sealed, {entry.count} pages"
            )
        for group, (pages, first) in enumerate(zip(entry.pages, entry.firsts, strict=True)):
            pool = self._store.pools[group]
            absent = self._absent[group]
            if self.tables[group, slot, : entry.count].tolist() != [page if page >= 0 else absent for page in pages]:
                raise AssertionError(f"the table of slot {slot} does not list its pages")
            whole = first if group == self._state else entry.count  # states are stored for some pages only
            if [page < 0 for page in pages[:whole]] != [index < first for index in range(whole)]:
                raise AssertionError(f"slot {slot} lacks a page of its window, or has one before it")
            for page in filter(lambda page: page >= 0, pages[max(first, entry.sealed) :]):
                holders = pool.refs(page) - self._store.moves.references(pool).count(page)
                if holders != 1 or pool.owner(page) is not None:
                    raise AssertionError(f"page {page} of slot {slot} may be written, but is shared or cached")

    def _require_empty(self, slot: int) -> None:
        if slot in self._slots:
            raise AssertionError(f"slot {slot} is in use")

    def _pages_to(self, length: int) -> int:
        count = self.pages_for(length)
        if count > self.config.width:
            raise ValueError(f"{length} tokens need {count} pages, a sequence can have {self.config.width}")
        return count

    def _new(self, firsts: list[int], cursor: Node | None, published: int, era: int | None = None) -> SlotPages:
        pages: list[list[int]] = [[] for _ in self._groups]
        era = self._era if era is None else era
        entry = SlotPages(pages, firsts, None, published, published, self._store.moves.batch, era)
        self._move_cursor(entry, cursor)
        return entry

    def _move_cursor(self, entry: SlotPages, node: Node | None) -> None:
        old, entry.cursor = entry.cursor, node
        if node is not None:
            node.pins += 1
        if old is not None:
            old.pins -= 1
            self._store.tree.prune(old)

    def _cursor_at(self, entry: SlotPages, pages: int) -> tuple[Node | None, int]:
        """Return the node of the last published page among a slot's first ``pages``, and the number of published
        ones."""
        node, published = entry.cursor, entry.published
        while published > pages:
            assert node is not None
            node, published = node.parent, published - 1
        return (node if published else None), published

    def _needs(self, more: int, length: int) -> list[int]:
        """Return the pages that each group takes for ``more`` pages of a sequence that then has ``length`` tokens."""
        return [min(more, self._states_kept(length)) if group == self._state else more for group in self._groups]

    def _states_kept(self, length: int) -> int:
        """Return the number of last pages with a stored state: the last page, from which the sequence continues, and
        the page before it if the last one is partial and cannot be matched later."""
        return 1 + bool(length % self.config.page_size and self.config.prefix_caching)

    def _grow(self, slot: int, entry: SlotPages, more: int, length: int) -> None:
        """Append ``more`` fresh pages to the slot, none before a group's first page, for a capacity of ``length``
        tokens."""
        start, kept = self._counts[slot], self._needs(more, length)
        for group in self._groups:
            pages, first, absent = entry.pages[group], entry.firsts[group], self._absent[group]
            for left in range(more, 0, -1):
                pages.append(self._store.take(group) if len(pages) >= first and left <= kept[group] else -1)
            self.tables[group, slot, start : len(pages)] = [page if page >= 0 else absent for page in pages[start:]]
            self.tables[group, slot, start:first] = absent
        self._slots[slot] = entry
        self._counts[slot] = entry.count

    def _copy(self, source: Pages | int, entry: SlotPages, index: int) -> None:
        """Fill a fresh page from device pages, or from a host page (which is pinned)."""
        moves, target = self._store.moves, tuple(pages[index] for pages in entry.pages)
        if isinstance(source, int):
            moves.import_page(source, target, self._store.pools)
        else:
            moves.copy_page(source, target, self._store.pools)

    def _replace(self, slot: int, entry: SlotPages, index: int, pages: list[int]) -> None:
        for group, page in enumerate(pages):
            if page != entry.pages[group][index]:
                entry.pages[group][index] = page
                self.tables[group, slot, index] = page
