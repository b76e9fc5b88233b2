"""Tests of `Hub`: sequence numbers, retained batches, snapshots, and slow subscribers."""

from __future__ import annotations

import asyncio

import pytest

from jaxinfer.serve.core.messages import KvEvents, KvRemoved, KvStored
from jaxinfer.serve.kv_events import hub as hubs
from jaxinfer.serve.kv_events.hub import Batch, Chunk, Hub, LaggedError


def stored(*names: str, parent: str | None = None, medium: str = "GPU", rank: int = 0) -> KvEvents:
    """Return the event of a chain of pages with one token each."""
    hashes = [name.encode().rjust(32, b"\0") for name in names]
    above = None if parent is None else parent.encode().rjust(32, b"\0")
    return KvEvents(rank, stored=[KvStored(medium, above, hashes, b"\1\0\0\0" * len(names))])


def removed(*names: str, medium: str = "GPU") -> KvEvents:
    hashes = [name.encode().rjust(32, b"\0") for name in names]
    return KvEvents(removed=[KvRemoved(medium, hashes)])


def items(hub: Hub, number: int = 0) -> list[Batch | Chunk]:
    subscription = hub.subscribe(number)
    found = list(subscription._items)
    subscription.close()
    return found


def test_an_engine_begins_with_nothing_and_a_name_of_its_own():
    hub = Hub(ranks=2)
    heard: list[Batch] = []
    hub.listen(heard.append)
    hub.begin()
    hub.take(stored("a", rank=1))
    hub.begin()
    cleared = [(batch.events.rank, batch.events.cleared) for batch in heard]
    assert cleared == [(0, True), (1, True), (1, False), (0, True), (1, True)]
    assert [batch.number - heard[0].number for batch in heard] == [0, 1, 2, 3, 4]
    assert heard[0].epoch == heard[2].epoch != heard[3].epoch == hub.epoch
    assert len(hub.mirror(1)) == 0


def test_numbers_of_later_doors_are_larger_and_what_earlier_ones_gave_is_worth_nothing():
    earlier = Hub(clock=lambda: 1000.0)
    for name in "abc":
        earlier.take(stored(name))
    cursor = earlier.number - 1
    later = Hub(clock=lambda: 1001.0)
    for name in "defghi":
        later.take(stored(name))
    (chunk,) = items(later, cursor)
    assert isinstance(chunk, Chunk)
    assert (chunk.number, chunk.first, len(chunk.copies)) == (later.number, True, 6)


@pytest.mark.parametrize(("back", "kinds"), [(0, "B"), (2, "BBB"), (3, "BBBB"), (4, "C"), (-1, ""), (-2, "C")])
def test_what_is_kept_is_replayed_from_the_number_asked_for(monkeypatch, back, kinds):
    monkeypatch.setattr(hubs, "BATCHES", 4)
    hub = Hub()
    for name in "abcdefg":
        hub.take(stored(name))
    found = items(hub, hub.number - back)
    assert "".join(type(item).__name__[0] for item in found) == kinds
    if kinds:
        assert found[-1].number == hub.number
        assert found[0].number == (hub.number if kinds == "C" else hub.number - back)


def test_of_large_batches_fewer_are_kept(monkeypatch):
    monkeypatch.setattr(hubs, "_KEPT_BYTES", 1000)
    hub = Hub()
    for number in range(20):
        hub.take(stored(*(f"{number}-{place}" for place in range(10))))
    kept = hub.since(hub.number - 1)
    assert kept is not None
    assert hub.since(hub.number - 5) is None


def test_a_snapshot_is_what_is_cached_parents_first_and_ends_at_the_last_number(monkeypatch):
    monkeypatch.setattr(hubs, "CHUNK_BLOCKS", 2)
    hub = Hub(ranks=2)
    hub.take(stored("a", "b", "c"))
    hub.take(stored("b", parent="a", medium="CPU"))
    hub.take(stored("x", rank=1))
    hub.take(removed("c"))
    chunks = hub.snapshot()
    told = [
        (chunk.rank, chunk.first, [(copy.digest[-1:].decode(), copy.medium) for copy in chunk.copies])
        for chunk in chunks
    ]
    assert told == [
        (0, True, [("a", "GPU"), ("b", "GPU")]),
        (0, False, [("b", "CPU")]),
        (1, True, [("x", "GPU")]),
    ]
    assert [chunk.number for chunk in chunks] == [hub.number - 2, hub.number - 1, hub.number]
    assert {(chunk.count, chunk.total) for chunk in chunks} == {(3, 4)}


def test_what_comes_while_a_snapshot_is_read_comes_behind_it():
    hub = Hub()
    hub.take(stored("a"))
    subscription = hub.subscribe()
    hub.take(stored("b", parent="a"))
    chunk, batch = subscription._items
    assert (chunk.number + 1, batch.number) == (batch.number, hub.number)
    assert [copy.digest[-1:] for copy in chunk.copies] == [b"a"]


def test_a_subscriber_that_takes_nothing_is_let_go_and_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(hubs, "BATCHES", 5)

    async def test():
        hub = Hub()
        slow, fast = hub.subscribe(), hub.subscribe()
        await fast.next()
        for number in range(9):
            hub.take(stored(str(number)))
            item = await fast.next()
            assert item is not None
            assert item.number == hub.number
        assert len(hub._subscriptions) == 1
        with pytest.raises(LaggedError):
            await slow.next()
        assert await fast.next(0.01) is None

    asyncio.run(test())
