"""Independent subscribers, written from the formats alone: `vllm.grpc.engine`, and vLLM's messages over ZMQ."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.kv.journals import mediums, shareable


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Batch as declared in vllm/distributed/kv_events.py (vLLM 0.33): names, order, defaults and tags."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class LegacyEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Array-encoded event, the format before events became maps."""


class LegacyStored(LegacyEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class LegacyRemoved(LegacyEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class LegacyCleared(LegacyEvent, tag="AllBlocksCleared"):
    pass


class LegacyBatch(EventBatch):
    events: list[LegacyStored | LegacyRemoved | LegacyCleared]


DECODERS = {"map": msgspec.msgpack.Decoder(KVEventBatch), "array": msgspec.msgpack.Decoder(LegacyBatch)}

Known = dict[int, tuple[int | None, tuple[int, ...], set[str]]]


def low(digest: bytes | int) -> int:
    """Return the last 64 bits of a digest as a signed integer."""
    return int.from_bytes(digest[-8:], signed=True) if isinstance(digest, bytes) else digest


class Router:
    """The blocks of one engine by their short hashes: parent, tokens and mediums of each."""

    def __init__(self) -> None:
        self.known: Known = {}
        self.cursor = 0

    def store(self, hashes, parent, tokens, size: int, medium: str) -> None:
        assert parent is None or parent in self.known, "a parent comes before its children"
        for number, digest in enumerate(hashes):
            entry = parent, tuple(tokens[number * size : (number + 1) * size]), set[str]()
            before = self.known.setdefault(digest, entry)
            assert before[:2] == entry[:2]
            before[2].add(medium)
            parent = digest

    def remove(self, hashes, medium: str) -> None:
        for digest in hashes:
            self.known[digest][2].remove(medium)
            if not self.known[digest][2]:
                del self.known[digest]

    def take_message(self, message: Any) -> bool:
        """Apply a KvEventBatch by the comments of common.proto; return False if batches are missing before it."""
        if message.load.load_only:
            return True
        number = message.sequence_number
        if not message.HasField("snapshot") and self.cursor and number <= self.cursor:
            return True  # duplicate
        begins = message.HasField("snapshot") and message.snapshot.index == 0
        if self.cursor and number != self.cursor + 1 and not begins:
            return False
        for event in message.events:
            match event.WhichOneof("data"):
                case "cleared":
                    self.known.clear()
                case "stored":
                    self._take_stored(event.stored)
                case "removed":
                    self.remove(event.removed.block_hashes, event.removed.medium)
        self.cursor = number
        return True

    def _take_stored(self, stored: Any) -> None:
        tokens = [token for block in stored.blocks for token in block.token_ids]
        parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
        hashes = [block.block_hash for block in stored.blocks]
        self.store(hashes, parent, tokens, stored.blocks[0].block_size, stored.medium)

    def take_events(self, number: int, events: list[Any]) -> bool:
        """Apply decoded events of a vLLM message; return False if messages are missing before it."""
        if self.cursor and number <= self.cursor:
            return True
        if self.cursor and number != self.cursor + 1:
            return False
        for event in events:
            match type(event).__name__.removeprefix("Legacy"):
                case "AllBlocksCleared" | "Cleared":
                    self.known.clear()
                case "BlockStored" | "Stored":
                    above = None if event.parent_block_hash is None else low(event.parent_block_hash)
                    self.store(map(low, event.block_hashes), above, event.token_ids, event.block_size, event.medium)
                case _:
                    self.remove(map(low, event.block_hashes), event.medium)
        self.cursor = number
        return True


def truth(kv: Any) -> Known:
    """Return the state that a router must have, read from the engine's prefix tree."""
    found: Known = {}
    for node in shareable(kv).values():
        above = None if node.parent.parent is None else low(node.parent.digest)
        tokens = tuple(int.from_bytes(node.key[1][at : at + 4], "little") for at in range(0, len(node.key[1]), 4))
        found[low(node.digest)] = above, tokens, mediums(kv, node)
    return found
