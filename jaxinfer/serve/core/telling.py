"""What the journals of an engine tell, as messages. No jax."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxinfer.kv.journal import Changes, Journal
from jaxinfer.kv.radix import Node
from jaxinfer.lora.store import LoRAStore
from jaxinfer.protos.internal import core_pb2 as pb


class Telling:
    """The journals, each with the number of its replica, and the store that knows the names of adapters."""

    def __init__(self, journals: Sequence[Journal], loras: LoRAStore | None) -> None:
        self._journals, self._loras = journals, loras

    def messages(self) -> Iterator[pb.KvEvents]:
        """What has changed since the last call, of each replica; called in the engine's thread."""
        for rank, journal in enumerate(self._journals):
            changes = journal.take()
            if changes is not None:
                yield events_message(rank, changes, self._names(changes))

    def _names(self, changes: Changes) -> Mapping[str, str]:
        """The names of adapters by their identity, if there are any among the pages."""
        if self._loras is None or not any(node.label.lora for node, _ in changes.came):
            return {}
        return {each.identity: each.name for each in self._loras.list()}


def events_message(rank: int, changes: Changes, names: Mapping[str, str]) -> pb.KvEvents:
    """Args:
    names: of adapters, by their identity; one without a name is called by that.
    """
    return pb.KvEvents(
        rank=rank,
        cleared=changes.cleared,
        stored=[_stored(medium, run, names) for medium, run in _runs(changes.came)],
        removed=[pb.KvRemoved(medium=medium, hashes=hashes) for medium, hashes in changes.left.items()],
    )


def _runs(came: Iterable[tuple[Node, str]]) -> list[tuple[str, list[Node]]]:
    """What came, in its order, and what lies below each other in one."""
    runs: list[tuple[str, list[Node]]] = []
    last: dict[str, list[Node]] = {}
    for node, medium in came:
        run = last.get(medium)
        if run is None or node.parent is not run[-1]:
            run = last[medium] = []
            runs.append((medium, run))
        run.append(node)
    return runs


def _stored(medium: str, run: Sequence[Node], names: Mapping[str, str]) -> pb.KvStored:
    above, (lora, extra) = run[0].parent, run[0].label
    return pb.KvStored(
        medium=medium,
        parent=None if above is None or above.parent is None else above.digest,
        hashes=[node.digest for node in run if node.digest is not None],
        tokens=b"".join([node.key[1] for node in run]),
        lora=pb.Lora(name=names.get(lora, lora), identity=lora) if lora else None,
        extra=extra,
    )
