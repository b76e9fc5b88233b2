"""A journal listener and a page-by-page comparison of its knowledge with the tree."""

from __future__ import annotations

from jaxinfer.kv.journal import DEVICE, HOST
from jaxinfer.kv.manager import KVManager
from jaxinfer.kv.radix import Node
from jaxinfer.serve.core.kv_event_encoder import events_message
from jaxinfer.serve.core.messages import KvEvents


def shareable(kv: KVManager) -> dict[tuple[bytes, ...], Node]:
    """Return the nodes that a journal reports, by the path of keys to them; see `jaxinfer.kv.journal`."""
    store, found = kv._store, dict[tuple[bytes, ...], Node]()
    groups = [group for group, window in enumerate(store.windows) if window is None] or range(len(store.windows))
    todo: list[tuple[tuple[bytes, ...], Node]] = [((name,), root) for name, root in store.tree._roots.items()]
    while todo:
        path, node = todo.pop()
        for (code, tokens), child in node.children.items():
            if all(child.has(group) for group in groups):
                way = (*path, code.to_bytes(8), tokens)
                found[way] = child
                todo.append((way, child))
    return found


def mediums(kv: KVManager, node: Node) -> set[str]:
    windows = kv._store.windows
    groups = [group for group, window in enumerate(windows) if window is None] or range(len(windows))
    device = all(node.pages[group] >= 0 for group in groups)
    host = node.host >= 0 and all(node.stored[group] for group in groups)
    return {medium for medium, there in ((DEVICE, device), (HOST, host or not device)) if there}


class Listener:
    """A journal consumer that stores reported pages by hash: parent, tokens and mediums of each page."""

    def __init__(self, kv: KVManager) -> None:
        self.kv, self.journal, self.looks = kv, kv.start_journal(), 0
        self.known: dict[bytes, tuple[bytes | None, bytes, set[str]]] = {}

    def look(self) -> KvEvents | None:
        """Take the changes since the last call, as they are sent."""
        changes = self.journal.take()
        if changes is None:
            return None
        self.looks += 1
        events = events_message(0, changes, {})
        self._take(events)
        return events

    def _take(self, changes: KvEvents) -> None:
        size = self.kv.config.page_size * 4
        if changes.cleared:
            self.known.clear()
        for run in changes.stored:
            above = run.parent
            assert above is None or above in self.known, "a parent comes before its children"
            for number, digest in enumerate(run.hashes):
                entry = above, run.tokens[number * size : (number + 1) * size], set[str]()
                before = self.known.setdefault(digest, entry)
                assert before[:2] == entry[:2]
                assert run.medium not in before[2], "it is told twice"
                before[2].add(run.medium)
                above = digest
        for gone in changes.removed:
            for digest in gone.hashes:
                self.known[digest][2].remove(gone.medium)
                if not self.known[digest][2]:
                    del self.known[digest]

    def check(self) -> None:
        """Check that the known pages are exactly the pages of the cache."""
        there = shareable(self.kv)
        digests = {node.digest: node for node in there.values()}
        assert None not in digests
        assert len(digests) == len(there), "two pages have one hash"
        assert self.known.keys() == digests.keys()
        for digest, (parent, tokens, told) in self.known.items():
            node = digests[digest]
            assert node.parent is not None
            assert parent == (None if node.parent.parent is None else node.parent.digest)
            assert tokens == node.key[1]
            assert told == mediums(self.kv, node)
        assert self.journal._shown.keys() == digests.keys()
