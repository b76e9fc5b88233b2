"""Journal of the cached pages that another sequence could match, as they are added and removed. No jax.

A page counts where its bytes and those of every page above it are present, on the device or on the host, in each
full-attention group. Next to such a group, windowed groups do not count: their pages are evicted early, and without
them a match is shorter. Where all groups have windows, all count.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from typing import NamedTuple

from jaxinfer.kv.cache_key import parts_of
from jaxinfer.kv.radix import TOKEN_BYTES, Node
from jaxinfer.kv.store import PageStore

DEVICE, HOST = "GPU", "CPU"
_BITS = ((1, DEVICE), (2, HOST))
_CODE_BYTES = 8


class Label(NamedTuple):
    """Public label of a page: the identity of its namespace's adapter, an opaque digest of scope and salt that does not
    reveal them, and a digest of the images in the page; "" where there is none."""

    lora: str = ""
    extra: str = ""
    images: str = ""


class Changes(NamedTuple):
    """Cache changes in order: first all pages were removed (``cleared``), then pages ``came``, each to a medium,
    parents first, then other pages ``left``: their hashes, by medium. ``page_bytes``: bytes of a page's tokens, which
    begin its key."""

    cleared: bool
    came: list[tuple[Node, str]]
    left: dict[str, list[bytes]]
    page_bytes: int


class Journal:
    """Reusable pages of a store, and their changes since the last `take`.

    Between two calls it costs no more than a set of touched nodes; a page that was added and removed in between is not
    reported.

    Args:
        store: a store without pages.
    """

    def __init__(self, store: PageStore) -> None:
        whole = [group for group, window in enumerate(store.windows) if window is None]
        self._tree, self._groups = store.tree, whole or list(range(len(store.windows)))
        self._tree.touched = {}
        self._page_bytes = TOKEN_BYTES * store.page_size
        self._shown: dict[bytes, int] = {}  # by hash: mediums on which a page was reported, one bit each
        self._secret = secrets.token_bytes(16)

    def take(self) -> Changes | None:
        """Return the changes since the last call; None: there are none."""
        touched, cleared = self._tree.touched, self._tree.cleared and bool(self._shown)
        self._tree.cleared = False
        if cleared:
            self._shown = {}
        if not touched and not cleared:
            return None
        self._tree.touched = {}
        changed = self._changed(touched or {})
        came = [(node, name) for node, was, now in changed.values() for bit, name in _BITS if now & ~was & bit]
        left = {name: [at for at, (_, was, now) in changed.items() if was & ~now & bit] for bit, name in _BITS}
        self._shown.update((digest, now) for digest, (_, _, now) in changed.items() if now)
        for digest in [digest for digest, (_, _, now) in changed.items() if not now]:
            del self._shown[digest]
        left = {name: hashes for name, hashes in left.items() if hashes}
        return Changes(cleared, came, left, self._page_bytes) if cleared or came or left else None

    def _changed(self, touched: Iterable[Node]) -> dict[bytes, tuple[Node, int, int]]:
        """Return by hash each page with changed mediums: its node, the mediums before, and now. Parents first."""
        changed: dict[bytes, tuple[Node, int, int]] = {}
        for node in touched:
            if node.parent is None and node.digest is not None:  # the node has left the tree
                changed[node.digest] = node, self._shown.get(node.digest, 0), 0
        for node in touched:
            if node.parent is not None:
                self._settle(node, changed)
        return {digest: change for digest, change in changed.items() if change[1] != change[2]}

    def _settle(self, first: Node, changed: dict[bytes, tuple[Node, int, int]]) -> None:
        """Find the current mediums of a page, and of the pages below it if they are affected."""
        todo = [first]
        while (above := todo[-1].parent) is not None and above.parent is not None and above.digest is None:
            todo.append(above)
        while todo:
            node = todo.pop()
            digest, reached = self._named(node, changed)
            before = self._shown.get(digest, 0)
            known = changed[digest][2] if digest in changed else before
            now = self._bits(node) if reached else 0
            if bool(now) != bool(known):
                changed.pop(digest, None)  # reinserted after its parent, which may have been added only now
                todo += node.children.values()
            changed[digest] = node, before, now

    def _bits(self, node: Node) -> int:
        if not all(node.has(group) for group in self._groups):
            return 0
        device = all(node.pages[group] >= 0 for group in self._groups)
        host = node.host >= 0 and all(node.stored[group] for group in self._groups)
        return device | host << 1 or 2  # partly on each: importing the host copy is needed

    def _named(self, node: Node, changed: dict[bytes, tuple[Node, int, int]]) -> tuple[bytes, bool]:
        """Return a node's hash (of all tokens up to it, their codes and the namespace), and whether the page above can
        be matched."""
        parent, (code, tokens) = node.parent, node.key
        assert parent is not None
        above = self._name_root(parent) if parent.digest is None else parent.digest
        if node.digest is None:
            node.digest = hashlib.sha256(b"".join((above, code.to_bytes(_CODE_BYTES), tokens))).digest()
            marks = tokens[self._page_bytes :]
            node.label = parent.label._replace(images=hashlib.sha256(marks).hexdigest()[:32] if marks else "")
        if parent.parent is None:
            return node.digest, True
        return node.digest, bool(changed[above][2] if above in changed else self._shown.get(above, 0))

    def _name_root(self, root: Node) -> bytes:
        scope, salt, lora = parts_of(root.key[1])
        secret = self._secret if scope or salt else b""  # without it, a reader of hashes could guess and test names
        root.digest = digest = hashlib.sha256(secret + root.key[1]).digest()
        root.label = Label(lora, hashlib.sha256(digest).hexdigest()[:32] if secret else "")
        return digest
