"""Tests of large prompt logprobs from the core, which are sent in chunks interleaved with other requests' tokens."""

import asyncio
import contextlib

import pytest

from jaxinfer.serve.core import link, messages, service
from jaxinfer.serve.core.async_engine import AsyncEngine
from jaxinfer.serve.core.outbox import Outbox
from jaxinfer.types import PositionExtras, PositionLogprobs, RoutedExperts, SequenceDelta, TokenLogprob
from tests.serve import fake_engine as fake
from tests.serve.core.test_core import BOUND, collect, make_request, nothing_is_left, ready, run, tokens

CONTEXT = 6000
LONG = tuple(3 + i % 250 for i in range(5000))
BYTES = 32 * messages.MOST_CANDIDATES
"""Upper bound of a message: a candidate takes at most 20 bytes, everything else little."""


@pytest.fixture
def heard(monkeypatch):
    """Return a list that receives every message with deltas, or parts of them, of a front end, and its bytes."""
    found: list[tuple[messages.Deltas | messages.Part, int]] = []
    take = link.CoreLink._take

    def listen(self, message: messages.FromCore) -> None:
        if isinstance(message, messages.Deltas | messages.Part):
            found.append((message, len(messages.encode(message))))  # on arrival: readers extend the deltas
        take(self, message)

    monkeypatch.setattr(link.CoreLink, "_take", listen)
    return found


def is_part(message: messages.FromCore) -> bool:
    return isinstance(message, messages.Part)


def test_the_answer_is_the_same_no_message_is_large_and_others_get_theirs_meanwhile(heard):
    async def main():
        long = [make_request(f"long{n}", LONG, 40, n=n, prompt_logprobs=20, logprobs=2) for n in (1, 2)]
        other = make_request("other", (5, 6), 1900)
        async with AsyncEngine(fake.FakeEngine(max_model_len=CONTEXT)) as near:
            want = [await collect(near, request) for request in long]
        async with ready("--context", str(CONTEXT)) as supervisor:
            far = supervisor.backend
            *got, meanwhile = await asyncio.gather(*(collect(far, request) for request in (*long, other)))
            assert got == want
            assert meanwhile[0][0] == tokens(other)
            await nothing_is_left(far)
        parts = [place for place, (message, _) in enumerate(heard) if is_part(message)]
        assert max(size for _, size in heard) < BYTES
        assert len(parts) >= 3 * (len(LONG) * 21 // messages.MOST_CANDIDATES - 1)
        between = heard[parts[0] : parts[-1]]
        assert sum(not is_part(message) for message, _ in between) > len(parts) / 4

    run(main())


@contextlib.asynccontextmanager
async def core_that_writes():
    """Yield a core without an engine, the list of messages written, and a function that lets one more be written."""
    core, written, gate = service._Core(asyncio.get_running_loop()), [], asyncio.Semaphore(0)

    async def write(data: bytes) -> None:
        await gate.acquire()
        written.append(messages.decode_from_core(data))

    writing = asyncio.create_task(core._outbox.run(write))
    yield core, written, gate.release
    writing.cancel()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def whole(index: int) -> SequenceDelta:
    position = PositionLogprobs(TokenLogprob(1, -1.0, 1), (), PositionExtras(vocabulary=bytes(4 * index)))
    return SequenceDelta("a", index, [1], [position])


def test_each_delta_with_a_whole_vocabulary_is_a_message():
    plain = [(number, SequenceDelta("b", 0, [number])) for number in range(3)]
    deltas = messages.deltas_of([*plain, (3, whole(1)), (4, whole(2))])
    first, *others = messages.split(deltas)
    assert (list(first.streams), list(first.others)) == ([0, 1, 2], [])
    found = [messages.decode_from_core(messages.encode(each)).others for each in others]
    assert [(number, delta.index) for ((number, delta),) in found] == [(3, 1), (4, 2)]
    assert [delta.logprobs[0].extras.vocabulary for ((_, delta),) in found] == [bytes(4), bytes(8)]
    same = messages.deltas_of(plain)
    assert messages.split(same) == [same]


def test_experts_of_prompts_are_sent_in_parts():
    extras = PositionExtras(experts=RoutedExperts(48, bytes(4 * 48 * 8)))
    positions = [None, *(PositionLogprobs(TokenLogprob(token, -1.0, 1), (), extras) for token in range(300))]
    delta = SequenceDelta("a", 0, [1], prompt_logprobs=list(positions))
    assert messages.is_large(delta)
    sent = [messages.encode(part) for part in messages.parts(3, delta)]
    assert max(map(len, sent)) < BYTES
    found = [position for data in sent for position in messages.decode_from_core(data).prompt_logprobs]
    assert found + delta.prompt_logprobs == positions


def large_delta() -> SequenceDelta:
    known = [None, *(fake.expected_logprobs(token, at, 20) for at, token in enumerate(LONG[1:], 1))]
    return SequenceDelta("long", 0, [7], prompt_logprobs=known)


def test_what_follows_a_large_delta_does_not_overtake_it():
    async def main():
        async with core_that_writes() as (core, written, release):
            feed = service._Feed(make_request("long", prompt_logprobs=20), 7, core, {0})
            core.deliver([(feed, large_delta())])
            await settled()
            for token in (8, 9):
                core.deliver([(feed, SequenceDelta("long", 0, [token]))])
                release()
                await settled()
            for _ in range(100):
                release()
                await settled()
            core.deliver([(feed, SequenceDelta("long", 0, [10]))])
            await settled()
        *parts, rest, after = written
        assert all(map(is_part, parts))
        ((_, whole),) = rest.others
        assert whole.token_ids == [7, 8, 9]
        assert after.tokens == [10]
        found = link.LinkStream(feed.request, lambda _: None, 7)
        for part in parts:
            found.take_part(part)
        found.take_whole(whole)
        assert (await anext(found)).prompt_logprobs == large_delta().prompt_logprobs

    asyncio.run(main())


def test_who_leaves_gets_no_more_parts():
    async def main():
        async with core_that_writes() as (core, written, release):
            feed = service._Feed(make_request("long", prompt_logprobs=20), 7, core, {0})
            core.deliver([(feed, large_delta())])
            await settled()
            release()
            await settled()
            core._leave(7)
            for _ in range(100):
                release()
                await settled()
        assert 1 <= len(written) <= 3  # the message being written, and those queued

    asyncio.run(main())


def test_what_is_put_last_lets_the_others_go_first():
    async def main():
        box: Outbox[str] = Outbox()
        written: list[str] = []
        gate = asyncio.Semaphore(0)

        async def write(message: str) -> None:
            await gate.acquire()
            written.append(message)

        running = asyncio.create_task(box.run(write))
        box.put("a")
        box.put("b")
        last = asyncio.create_task(box.put_last("z"))
        await asyncio.sleep(0)
        box.put("c")
        for _ in range(4):
            gate.release()
        await asyncio.wait_for(last, BOUND)
        box.close()
        await asyncio.wait_for(running, BOUND)
        assert written == ["a", "b", "c", "z"]

    asyncio.run(main())
