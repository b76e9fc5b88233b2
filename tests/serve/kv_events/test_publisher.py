"""Tests of KV events over ZMQ: frames decoded by declarations of vLLM's structs, and replays."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest
import zmq
import zmq.asyncio

from jaxinfer.serve.api.kv_events import KvEventsConfig
from jaxinfer.serve.core.messages import KvEvents
from jaxinfer.serve.kv_events import publisher as publisher_module
from jaxinfer.serve.kv_events.hub import Hub
from jaxinfer.serve.kv_events.publisher import Publisher
from jaxinfer.serve.runtime import malloc_trim
from jaxinfer.serve.settings import ServeConfigError
from jaxinfer.types import LoRARef
from tests.serve.kv_events.subscribers import DECODERS, AllBlocksCleared, BlockRemoved, BlockStored, Router
from tests.serve.kv_events.test_hub import removed, stored

SECONDS = 60.0
LOOPBACK = "tcp://127.0.0.1:0"


@contextlib.asynccontextmanager
async def publishing(form: str = "map", **changes):
    hub = Hub()
    config = KvEventsConfig(
        kv_events_endpoint=LOOPBACK, kv_events_replay_endpoint=LOOPBACK, kv_events_format=form, **changes
    )
    publisher, context = Publisher(config, hub, lambda: "kv@here@model"), zmq.asyncio.Context()
    try:
        yield hub, publisher, context
    finally:
        context.destroy(linger=0)
        await publisher.stop()


async def subscribed(hub: Hub, publisher: Publisher, context) -> zmq.asyncio.Socket:
    """Return a subscriber that is connected: PUB does not report new subscribers."""
    sub = context.socket(zmq.SUB)
    sub.connect(publisher.endpoint)
    sub.subscribe("kv@")
    while not await sub.poll(20):
        hub.begin()
    while await sub.poll(100):
        await sub.recv_multipart()
    return sub


async def received(socket) -> list[bytes]:
    return await asyncio.wait_for(socket.recv_multipart(), SECONDS)


async def replayed(context, publisher: Publisher, begin: int) -> list[list[bytes]]:
    asking = context.socket(zmq.DEALER)
    asking.connect(publisher.replay_endpoint)
    await asking.send_multipart([b"", begin.to_bytes(8)])
    found = []
    while True:
        frames = await received(asking)
        found.append(frames)
        if int.from_bytes(frames[2], signed=True) == -1:
            return found


@pytest.mark.parametrize("form", ["map", "array"])
def test_messages_are_vllms(form):
    async def test():
        async with publishing(form) as (hub, publisher, context):
            sub = await subscribed(hub, publisher, context)
            (run,) = stored("a", "b").stored
            labelled = msgspec.structs.replace(run, lora=LoRARef("pirate", "0f" * 32), extra="77")
            hub.take(KvEvents(stored=[labelled]))
            hub.take(removed("b"))
            hub.begin()
            frames = [await received(sub) for _ in range(3)]
            assert {topic for topic, _, _ in frames} == {b"kv@here@model"}
            assert [int.from_bytes(number) for _, number, _ in frames] == [hub.number - 2, hub.number - 1, hub.number]
            batches = [DECODERS[form].decode(payload) for _, _, payload in frames]
            assert [batch.data_parallel_rank for batch in batches] == [0, 0, 0]
            ((first,), (second,), (third,)) = (batch.events for batch in batches)
            assert (len(first.block_hashes), first.parent_block_hash, first.token_ids) == (2, None, [1, 1])
            assert (first.block_size, first.medium, first.lora_name) == (1, "GPU", "pirate")
            assert 0 < first.lora_id < 2**31
            assert first.extra_keys == [("77",), ("77",)]
            assert (second.block_hashes, second.medium) == (first.block_hashes[1:], "GPU")
            if form == "map":
                assert [type(event) for event in (first, second, third)] == [
                    BlockStored,
                    BlockRemoved,
                    AllBlocksCleared,
                ]

    asyncio.run(test())


def test_what_was_missed_is_sent_again_and_ends_with_minus_one():
    async def test():
        async with publishing() as (hub, publisher, context):
            hub.begin()
            first = hub.number
            for name in "abcde":
                hub.take(stored(name))
            *batches, end = await replayed(context, publisher, first + 2)
            assert [int.from_bytes(number) for _, _, number, _ in batches] == list(range(first + 2, hub.number + 1))
            assert {(empty, topic) for empty, topic, _, _ in batches} == {(b"", b"kv@here@model")}
            assert end == [b"", b"", (-1).to_bytes(8, signed=True), b""]
            assert await replayed(context, publisher, hub.number + 1) == [end]
            router = Router()
            for _, _, number, payload in (await replayed(context, publisher, 0))[:-1]:
                assert router.take_events(int.from_bytes(number), DECODERS["map"].decode(payload).events)
            assert len(router.known) == 5

    asyncio.run(test())


@pytest.mark.parametrize("frames", [[b""], [b"x", b"\0" * 8], [b"", b"\0" * 7], [b"", b"\0" * 8, b""]])
def test_a_request_that_is_none_changes_nothing(frames):
    async def test():
        async with publishing() as (hub, publisher, context):
            hub.begin()
            wrong = context.socket(zmq.DEALER)
            wrong.connect(publisher.replay_endpoint)
            await wrong.send_multipart(frames)
            assert len(await replayed(context, publisher, 0)) == 2

    asyncio.run(test())


def test_an_address_that_is_taken_is_one_sentence_with_the_setting():
    async def test():
        async with publishing() as (_, publisher, _):
            config = KvEventsConfig(kv_events_endpoint=publisher.endpoint)
            with pytest.raises(ServeConfigError, match=r"kv_events_endpoint=tcp://127.0.0.1:\d+: cannot listen"):
                Publisher(config, Hub(), lambda: "")

    asyncio.run(test())


def test_a_subscriber_that_does_not_read_holds_up_nobody():
    async def test():
        async with publishing() as (hub, publisher, context):
            slow = context.socket(zmq.SUB)
            slow.set_hwm(1)
            slow.connect(publisher.endpoint)
            slow.subscribe("")
            sub = await subscribed(hub, publisher, context)
            for number in range(2000):
                hub.take(stored(str(number)))
            while int.from_bytes((await received(sub))[1]) != hub.number:
                pass

    asyncio.run(test())


def test_events_of_many_pages_stay_one_message():
    async def test():
        async with publishing() as (hub, publisher, context):
            hub.take(KvEvents(cleared=True, stored=stored(*map(str, range(3000))).stored))
            frames, _ = await replayed(context, publisher, 0)
            assert len(DECODERS["map"].decode(frames[3]).events[1].token_ids) == 3000

    asyncio.run(test())


def test_one_that_never_reads_is_given_up_and_holds_little(monkeypatch) -> None:
    """A replay client that never reads is dropped before it holds 10,000 batches (200 MB); other clients are served."""
    monkeypatch.setattr(publisher_module, "_SLOW_SECONDS", 0.5)

    async def run() -> None:
        async with publishing() as (_, publisher, context):
            publisher._kept.extend((number, bytes(20_000)) for number in range(10_000))
            before, lazy = malloc_trim.resident(), context.socket(zmq.DEALER)
            lazy.set_hwm(1)
            lazy.connect(publisher.replay_endpoint)
            await lazy.send_multipart([b"", bytes(8)])
            while not publisher._replays:
                await asyncio.sleep(0.01)
            while publisher._replays:
                assert malloc_trim.resident() - before < 50 << 20
                await asyncio.sleep(0.01)
            assert len(await replayed(context, publisher, 9_990)) == 11  # including the end marker

    asyncio.run(run())
