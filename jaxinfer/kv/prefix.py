"""Lookup of the longest cached prefix of a sequence. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxinfer.kv.radix import Node, PageKeys
from jaxinfer.kv.store import PageStore
from jaxinfer.types import STATE


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
        rest = keys.tokens[start : min(limit, start + size)].tobytes()
        parent = nodes[-1] if nodes else root
        donor, head = store.tree.closest(
            parent, codes[len(nodes)], rest, lambda node: store.donor_source(node) is not None
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
