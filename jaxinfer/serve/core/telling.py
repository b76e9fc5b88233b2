"""What the journals of an engine tell, as messages. No jax."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jaxinfer.kv.journal import Changes, Journal, Stored
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
        if self._loras is None or not any(run.label.lora for run in changes.stored):
            return {}
        return {each.identity: each.name for each in self._loras.list()}


def events_message(rank: int, changes: Changes, names: Mapping[str, str]) -> pb.KvEvents:
    """Args:
    names: of adapters, by their identity; one without a name is called by that.
    """
    return pb.KvEvents(
        rank=rank,
        cleared=changes.cleared,
        stored=[_stored_message(run, names) for run in changes.stored],
        removed=[pb.KvRemoved(medium=gone.medium, hashes=gone.hashes) for gone in changes.removed],
    )


def _stored_message(run: Stored, names: Mapping[str, str]) -> pb.KvStored:
    lora, extra = run.label
    adapter = pb.Lora(name=names.get(lora, lora), identity=lora) if lora else None
    return pb.KvStored(
        medium=run.medium, parent=run.parent, hashes=run.hashes, tokens=run.tokens, lora=adapter, extra=extra
    )
