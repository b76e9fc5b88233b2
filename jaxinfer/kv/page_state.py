"""Records of the KV manager: cache sizes, usage, the pages of a slot. No jax."""

from __future__ import annotations

import dataclasses

from jaxinfer.kv.radix import Node


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
