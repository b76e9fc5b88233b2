"""KV event encoding for vLLM's subscribers: msgpack messages, events as maps or as arrays. No jax."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from jaxinfer.serve.core.messages import KvEvents, KvStored
from jaxinfer.serve.kv_events.hub import Batch
from jaxinfer.serve.kv_events.tokens import lora_id, token_ids

END = (-1).to_bytes(8, signed=True)
"""Sequence number that ends a replay."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The content of one message. Always an array."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """Blocks that were stored on a medium; fields without a default are always sent."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    """Blocks that were removed from a medium."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True, gc=False):
    """The removal of all blocks from all mediums."""


class StoredArray(BlockStored, tag="BlockStored", array_like=True, gc=False):
    """`BlockStored` as an array, its tag first; the next two classes are arrays too."""


class RemovedArray(BlockRemoved, tag="BlockRemoved", array_like=True, gc=False):
    pass


class ClearedArray(AllBlocksCleared, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


_KINDS: dict[str, tuple[Any, Any, Any]] = {
    "map": (BlockStored, BlockRemoved, AllBlocksCleared),
    "array": (StoredArray, RemovedArray, ClearedArray),
}


class Encoder:
    """An encoder of batches; ``form``: "map" or "array"."""

    def __init__(self, form: str) -> None:
        self._stored, self._removed, self._cleared = _KINDS[form]
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, batch: Batch) -> bytes:
        """Return the last frame of a message."""
        return self._encoder.encode(EventBatch(batch.timestamp, list(self._events(batch.events)), batch.events.rank))

    def _events(self, events: KvEvents) -> Iterable[Any]:
        if events.cleared:
            yield self._cleared()
        for run in events.stored:
            yield self._stored(**stored_fields(run))
        for gone in events.removed:
            yield self._removed(list(gone.hashes), gone.medium)


def stored_fields(run: KvStored) -> dict[str, Any]:
    """Convert a run of pages to the fields of vLLM's event."""
    hashes, tokens = list(run.hashes), token_ids(run.tokens)
    return {
        "block_hashes": hashes,
        "parent_block_hash": run.parent,
        "token_ids": tokens,
        "block_size": len(tokens) // len(hashes),
        "lora_id": lora_id(run.lora.identity) if run.lora else None,
        "medium": run.medium,
        "lora_name": run.lora.name if run.lora else None,
        "extra_keys": [run.extra_keys] * len(hashes) if run.extra_keys else None,
    }


def number_bytes(number: int) -> bytes:
    """Return the second frame of a message."""
    return number.to_bytes(8)
