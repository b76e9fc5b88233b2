"""Conversion of cache journals to KV event messages. No jax."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxinfer.kv.journal import Changes, Journal
from jaxinfer.kv.radix import Node
from jaxinfer.lora.store import LoRAStore
from jaxinfer.serve.core.messages import KvEvents, KvRemoved, KvStored
from jaxinfer.types import LoRARef


class KvEventEncoder:
    """The cache journals of all replicas, by rank, and the store with the names of adapters."""

    def __init__(self, journals: Sequence[Journal], loras: LoRAStore | None) -> None:
        self._journals, self._loras = journals, loras

    def messages(self) -> Iterator[KvEvents]:
        """Yield the changes of each replica since the last call. Called in the engine thread."""
        for rank, journal in enumerate(self._journals):
            changes = journal.take()
            if changes is not None:
                yield events_message(rank, changes, self._names(changes))

    def _names(self, changes: Changes) -> Mapping[str, str]:
        """Return the names of adapters by identity, if any of the pages belong to an adapter."""
        if self._loras is None or not any(node.label.lora for node, _ in changes.came):
            return {}
        return {each.identity: each.name for each in self._loras.list()}


def events_message(rank: int, changes: Changes, names: Mapping[str, str]) -> KvEvents:
    """Convert the changes of one replica to a message. ``names``: adapter names by identity, which replaces a missing
    name."""
    return KvEvents(
        rank=rank,
        cleared=changes.cleared,
        stored=[_stored(medium, run, names, changes.page_bytes) for medium, run in _runs(changes.came)],
        removed=[KvRemoved(medium, hashes) for medium, hashes in changes.left.items()],
    )


def _runs(came: Iterable[tuple[Node, str]]) -> list[tuple[str, list[Node]]]:
    """Group stored pages, in their order, into runs of one label that follow each other as parent and child."""
    runs: list[tuple[str, list[Node]]] = []
    last: dict[str, list[Node]] = {}
    for node, medium in came:
        run = last.get(medium)
        if run is None or node.parent is not run[-1] or node.label != run[-1].label:
            run = last[medium] = []
            runs.append((medium, run))
        run.append(node)
    return runs


def _stored(medium: str, run: Sequence[Node], names: Mapping[str, str], page_bytes: int) -> KvStored:
    above, (lora, extra, images) = run[0].parent, run[0].label
    return KvStored(
        medium=medium,
        parent=None if above is None or above.parent is None else above.digest,
        hashes=[node.digest for node in run if node.digest is not None],
        tokens=b"".join([node.key[1][:page_bytes] for node in run]),
        lora=LoRARef(names.get(lora, lora), lora) if lora else None,
        extra=extra,
        images=images,
    )
