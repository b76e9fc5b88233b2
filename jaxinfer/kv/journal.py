"""What others may count on: the cached pages that another sequence could be given, as they come and go. No jax.

A page counts where its bytes and those of every page above it are there, on the device or on the host, in each group
that sees everything. Groups with a window do not count beside such a group: their pages go early, and without them a
match is shorter. Where all groups have windows, all count.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxinfer.kv.identity import parts_of
from jaxinfer.kv.radix import Node
from jaxinfer.kv.store import PageStore

DEVICE, HOST = "GPU", "CPU"
MEDIUMS = (DEVICE, HOST)
_CODE_BYTES = 8


class Label(NamedTuple):
    """What parts the pages of a namespace from others.

    Attributes:
        lora: identity of the adapter that computed them, "" without.
        extra: stands for scope and salt, "" where there is neither. It tells nobody what they are.
    """

    lora: str = ""
    extra: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """Pages that have come to a medium: each is the parent of the next one.

    Attributes:
        parent: hash of the page above the first one; None: it is the first of a sequence.
        hashes: of the pages, 32 bytes each.
        tokens: int32 [pages * page_size], of this machine's byte order.
    """

    medium: str
    label: Label
    parent: bytes | None
    hashes: list[bytes]
    tokens: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Removed:
    """Pages that have left a medium."""

    medium: str
    hashes: list[bytes]


@dataclasses.dataclass(frozen=True, slots=True)
class Changes:
    """What has changed: first everything went (``cleared``), then pages came, parents first, then others left."""

    cleared: bool
    stored: list[Stored]
    removed: list[Removed]


class Journal:
    """The pages of a store that others may count on, and how they have changed since the last look.

    It costs nothing between two looks but a set of nodes that were touched; a page that has come and gone in between is
    not told of.

    Args:
        store: has no pages yet.
    """

    def __init__(self, store: PageStore) -> None:
        whole = [group for group, window in enumerate(store.windows) if window is None]
        self._tree, self._groups = store.tree, whole or list(range(len(store.windows)))
        self._tree.touched = {}
        self._shown: dict[bytes, int] = {}  # by hash, the mediums on which others know a page, a bit each
        self._secret = secrets.token_bytes(16)

    @property
    def shown(self) -> dict[bytes, frozenset[str]]:
        """The mediums of each page, by its hash, as of the last look."""
        return {digest: frozenset(_mediums(bits)) for digest, bits in self._shown.items()}

    def take(self) -> Changes | None:
        """Return what has changed since the last call; None: nothing."""
        touched, cleared = self._tree.touched, self._tree.cleared
        if not touched and not cleared:
            return None
        self._tree.touched, self._tree.cleared = {}, False
        if cleared:
            cleared = bool(self._shown)
            self._shown = {}
        changed = self._changed(touched or ())
        stored = _runs((node, medium) for node, before, now in changed.values() for medium in _mediums(now & ~before))
        gone: dict[str, list[bytes]] = {medium: [] for medium in MEDIUMS}
        for digest, (_, before, now) in changed.items():
            for medium in _mediums(before & ~now):
                gone[medium].append(digest)
        removed = [Removed(medium, hashes) for medium, hashes in gone.items() if hashes]
        self._keep(changed)
        return Changes(cleared, stored, removed) if cleared or stored or removed else None

    def _keep(self, changed: dict[bytes, tuple[Node, int, int]]) -> None:
        for digest, (_, _, now) in changed.items():
            if now:
                self._shown[digest] = now
            else:
                self._shown.pop(digest, None)

    def _changed(self, touched: Iterable[Node]) -> dict[bytes, tuple[Node, int, int]]:
        """By its hash, each page whose mediums are others now: its node, those before, and those now. Parents first."""
        changed: dict[bytes, tuple[Node, int, int]] = {}
        attached = []
        for node in touched:
            if node.parent is not None:
                attached.append(node)
            elif node.digest is not None:  # it has left the tree
                changed[node.digest] = node, self._shown.get(node.digest, 0), 0
        for node in attached:
            self._settle(node, changed)
        return {digest: change for digest, change in changed.items() if change[1] != change[2]}

    def _settle(self, first: Node, changed: dict[bytes, tuple[Node, int, int]]) -> None:
        """Find the mediums of a page now, and of those below it if that makes a difference to them."""
        path = [first]
        while (above := path[-1].parent) is not None and above.parent is not None and above.digest is None:
            path.append(above)
        todo = path
        while todo:
            node = todo.pop()
            self._name(node)
            assert node.digest is not None
            assert node.parent is not None
            before = self._shown.get(node.digest, 0)
            known = changed[node.digest][2] if node.digest in changed else before
            now = self._bits(node) if self._reached(node.parent, changed) else 0
            if bool(now) != bool(known):
                changed.pop(node.digest, None)  # to be behind its parent, which has perhaps only come now
                todo += node.children.values()
            changed[node.digest] = node, before, now

    def _reached(self, parent: Node, changed: dict[bytes, tuple[Node, int, int]]) -> bool:
        """Whether a sequence could be given the page above, or there is none."""
        if parent.parent is None:
            return True
        digest = parent.digest
        assert digest is not None
        return bool(changed[digest][2] if digest in changed else self._shown.get(digest, 0))

    def _bits(self, node: Node) -> int:
        if not all(node.has(group) for group in self._groups):
            return 0
        device = all(node.pages[group] >= 0 for group in self._groups)
        host = node.host >= 0 and all(node.stored[group] for group in self._groups)
        return device | host << 1 or 2  # partly here, partly there: it has to come from the host

    def _name(self, node: Node) -> None:
        """Give a node its hash: of all tokens up to it, of what computed them, and of its namespace."""
        if node.digest is not None:
            return
        assert node.parent is not None
        above, label = node.parent.digest, node.parent.label
        if above is None or label is None:
            above, label = self._name_root(node.parent)
        code, tokens = node.key
        node.digest = hashlib.sha256(b"".join((above, code.to_bytes(_CODE_BYTES), tokens))).digest()
        node.label = label

    def _name_root(self, root: Node) -> tuple[bytes, Label]:
        scope, salt, lora = parts_of(root.key[1])
        secret = self._secret if scope or salt else b""  # who has a hash might guess names and try them
        digest = hashlib.sha256(secret + root.key[1]).digest()
        root.digest, root.label = digest, Label(lora, hashlib.sha256(digest).hexdigest()[:32] if secret else "")
        return root.digest, root.label


def _mediums(bits: int) -> Iterator[str]:
    return (name for number, name in enumerate(MEDIUMS) if bits >> number & 1)


def _runs(came: Iterable[tuple[Node, str]]) -> list[Stored]:
    """What came, in its order, and what lies below each other in one."""
    runs: list[tuple[str, list[Node]]] = []
    last: dict[str, list[Node]] = {}
    for node, medium in came:
        run = last.get(medium)
        if run is None or node.parent is not run[-1]:
            run = last[medium] = []
            runs.append((medium, run))
        run.append(node)
    return [_stored(*run) for run in runs]


def _stored(medium: str, run: list[Node]) -> Stored:
    above = run[0].parent
    assert above is not None
    assert run[0].label is not None
    parent = None if above.parent is None else above.digest
    hashes = [node.digest for node in run if node.digest is not None]
    return Stored(medium, run[0].label, parent, hashes, b"".join([node.key[1] for node in run]))
