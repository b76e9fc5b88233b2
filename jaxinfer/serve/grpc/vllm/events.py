"""SubscribeKvEvents of `vllm.grpc.engine`: a hub's batches and snapshots as messages, with the engine's load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.core.messages import KvRemoved, KvStored
from jaxinfer.serve.grpc.vllm import messages
from jaxinfer.serve.kv_events.hub import Batch, Chunk, Hub, LaggedError
from jaxinfer.serve.kv_events.mirror import TOKEN_BYTES, stored_of
from jaxinfer.serve.kv_events.tokens import lora_id, token_ids

LOOK_SECONDS, HEARTBEAT_SECONDS = 0.25, 1.0
"""Seconds between two samples of the engine's load, and between two heartbeats if the load does not change."""

_FIRST_SECONDS = 0.05  # maximum wait of a stream's first message for the load

_LEVELS = {"GPU": 0, "CPU": 1}
_TIERS = {"GPU": "DEVICE", "CPU": "HOST"}
_LOADS = {
    "num_running_reqs": "running_requests",
    "num_waiting_reqs": "waiting_requests",
    "num_waiting_uncached_tokens": "waiting_uncached_tokens",
    "token_usage": "token_usage",
    "gen_throughput": "gen_throughput",
    "max_running_requests": "max_running_requests",
}
"""Fields of a SchedulerLoad, and their names in an EngineLoad."""
_MORE_LOADS = ("cache_hit_rate", "num_used_tokens", "max_total_num_tokens")
"""Fields of both messages that are sent only with heartbeats."""

type Load = Callable[[], Awaitable[Any]]
type Write = Callable[[Any], Awaitable[None]]


async def send_events(hub: Hub, request: Any, load: Load, write: Write) -> None:
    """Write KV cache events to a subscriber until it disconnects.

    Args:
        load: returns the engine's SchedulerLoad; raises `ServeError` while the engine does not run.

    Raises:
        ServeError: TOO_LARGE: the subscriber has fallen behind and must subscribe again.
    """
    begin = request.start_sequence_number
    subscription = hub.subscribe(begin)
    stream = _Stream(hub, load, write, begin - 1 if begin else 0)
    try:
        while True:
            await stream.send(await subscription.next(LOOK_SECONDS))
    except LaggedError as error:
        reason = "the subscriber has not read what came: subscribe again, for a snapshot"
        raise ServeError(Kind.TOO_LARGE, reason) from error
    finally:
        subscription.close()
        stream.close()


class _Stream:
    """State of one subscriber's stream.

    Args:
        last: number of the batch before the first one.
    """

    def __init__(self, hub: Hub, load: Load, write: Write, last: int) -> None:
        self._hub, self._load, self._write, self._last = hub, load, write, last
        self._events = self._samples = 0
        self._known: Any = None  # the last sampled load
        self._told: Any = None
        self._sampled = self._beaten = 0.0
        self._sampling: asyncio.Task[None] | None = None

    def close(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()

    async def send(self, item: Batch | Chunk | None) -> None:
        """Send a batch or a chunk with the last sampled load; without an item, send the load if it has changed."""
        asked = self._sampling is not None and not self._sampling.done()
        if not asked and time.monotonic() - self._sampled >= LOOK_SECONDS:
            self._sampling = asyncio.create_task(self._sample())  # the engine may reply after its current step
            await asyncio.wait({self._sampling}, timeout=0 if self._samples else _FIRST_SECONDS)
        if item is None:
            await self._send_load()
            return
        message = self._message(item)
        if self._known is not None:
            message.load.CopyFrom(self._record(whole=not self._samples))
        self._last = message.sequence_number
        await self._write(message)

    def _message(self, item: Batch | Chunk) -> Any:
        if isinstance(item, Chunk):
            return chunk_message(item, self._hub.ranks)
        made = batch_message(item, self._hub.ranks, self._events)
        self._events += len(made.events)
        return made

    async def _sample(self) -> None:
        try:
            self._known = await self._load()
        except ServeError:  # the engine does not run
            self._known = None
        self._sampled = time.monotonic()

    async def _send_load(self) -> None:
        now = time.monotonic()
        if self._known is None or (self._known == self._told and now - self._beaten < HEARTBEAT_SECONDS):
            return
        record = self._record(whole=True)
        record.load_only = True
        self._beaten = now
        await self._write(messages.common.KvEventBatch(sequence_number=self._last, timestamp=time.time(), load=record))

    def _record(self, *, whole: bool) -> Any:
        self._samples += 1
        self._told, fields = self._known, dict(_LOADS)
        if whole:
            fields |= {name: name for name in _MORE_LOADS}
        age = int(1000 * (time.monotonic() - self._sampled))
        values = {theirs: getattr(self._known, ours) for ours, theirs in fields.items()}
        return messages.common.EngineLoad(**values, age_ms=age, sample=self._samples)


def batch_message(batch: Batch, ranks: int = 1, events: int = 0) -> Any:
    """Convert a batch to a message of `vllm.grpc.engine`.

    Args:
        ranks: number of engine replicas; the rank is only set if there are several.
        events: number of events sent before on the stream.
    """
    made = list(_events(batch.events.cleared, batch.events.stored, batch.events.removed))
    for number, event in enumerate(made, events + 1):
        event.event_id = number
    return _message(batch.number, batch.timestamp, made, batch.events.rank if ranks > 1 else None)


def chunk_message(chunk: Chunk, ranks: int = 1) -> Any:
    """Convert a chunk of a snapshot."""
    made = list(_events(chunk.first, stored_of(chunk.copies), ()))
    message = _message(chunk.number, chunk.timestamp, made, chunk.rank if ranks > 1 else None)
    message.snapshot.index, message.snapshot.count, message.snapshot.blocks = chunk.index, chunk.count, chunk.total
    return message


def _message(number: int, timestamp: float, events: Sequence[Any], rank: int | None) -> Any:
    return messages.common.KvEventBatch(sequence_number=number, timestamp=timestamp, events=events, dp_rank=rank)


def _events(cleared: bool, stored: Sequence[KvStored], removed: Sequence[KvRemoved]) -> Iterator[Any]:
    common = messages.common
    if cleared:
        yield common.KvCacheEvent(cleared=common.KvCacheCleared())
    for run in stored:
        yield common.KvCacheEvent(stored=_stored(run))
    for gone in removed:
        hashes = [short(digest) for digest in gone.hashes]
        yield common.KvCacheEvent(removed=common.KvBlocksRemoved(block_hashes=hashes, **_place(gone.medium)))


def _place(medium: str) -> dict[str, Any]:
    """Return the storage tier of blocks, in the old and the new fields."""
    tiers = messages.common.KvCacheTier
    return {"cache_level": _LEVELS[medium], "tier": tiers.Value(f"KV_CACHE_TIER_{_TIERS[medium]}"), "medium": medium}


def _stored(run: KvStored) -> Any:
    common, place = messages.common, _place(run.medium)
    level = place.pop("cache_level")
    tokens, count = run.tokens, len(run.hashes)
    size = len(tokens) // count
    adapter = {"lora_id": lora_id(run.lora.identity)} if run.lora else {}
    keys = [common.KvBlockExtraKey(text=key) for key in run.extra_keys]
    blocks = [
        common.KvBlock(
            block_hash=short(digest),
            token_ids=token_ids(tokens[place * size : (place + 1) * size]),
            block_size=size // TOKEN_BYTES,
            cache_level=level,
            extra_keys=keys,
            **adapter,
        )
        for place, digest in enumerate(run.hashes)
    ]
    return common.KvBlocksStored(
        blocks=blocks,
        parent_block_hash=None if run.parent is None else short(run.parent),
        lora_name=run.lora.name if run.lora else None,
        cache_salt=run.extra or None,
        **place,
    )


def short(digest: bytes) -> int:
    """Return the last 64 bits of a hash, signed, as routers truncate vLLM's hashes."""
    return int.from_bytes(digest[-8:], signed=True)
