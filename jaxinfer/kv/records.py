"""Records of the KV manager: its sizes, what it tells, the pages of a slot. No jax."""

from __future__ import annotations

import dataclasses

from jaxinfer.kv.radix import Node


@dataclasses.dataclass(frozen=True)
class KVConfig:
    """Sizes of the cache.

    Attributes:
        pages: of each group.
        page_size: tokens per page.
        slots: sequences that run at once, and forks of them.
        width: most pages of one sequence.
        windows: of each group; None: every token is seen for ever; `STATE`: the group of states.
        states: pages of that group.
        host_pages: pages in host memory, for sequences that are swapped out and for what is evicted.
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
    """Pages of a sequence in host memory, in order. Group g has none before page ``firsts[g]``; ``era``: see
    `SlotPages`."""

    hosts: tuple[int, ...]
    firsts: tuple[int, ...]
    era: int


@dataclasses.dataclass(slots=True)
class SlotPages:
    """Pages of a slot: ``pages[group][page]``, -1 before ``firsts[group]``, and of states where none is kept.

    The first ``published`` pages are known to the tree, down to ``cursor``. The first ``sealed`` ones are full and may
    be shared: they are not written any more. ``born`` is the batch in which the slot was filled, ``era`` counts the
    resets before its first token was computed: pages of an earlier era are nobody else's any more.
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
