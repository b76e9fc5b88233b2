"""Tests of the messages of `CoreLink` without a core."""

import asyncio

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.core import wire
from jaxinfer.serve.core.link import CoreLink, LinkStream
from jaxinfer.types import Request, SequenceDelta

NAMES = [(1, "leaves"), (2, "stays")]


def test_who_leaves_before_the_core_has_accepted_is_not_served_for_nothing():
    async def run() -> None:
        link = CoreLink("nowhere", lambda message: None)
        asking = asyncio.ensure_future(link.submit(Request("me", (1,), SamplingParams())))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        submit, leave = link._outbox._messages
        assert leave.WhichOneof("kind") == "leave"
        assert leave.leave.number == submit.submit.number
        assert not link._streams
        assert not link._answers

    asyncio.run(run())


def test_who_leaves_as_soon_as_it_is_told_does_not_end_the_link():
    """A reader may leave during delivery, as one does that finds its stop string in the latest delta."""

    async def run() -> None:
        link = CoreLink("nowhere", lambda message: None)
        streams = [LinkStream(Request(name, (1,), SamplingParams()), link._leave, number) for number, name in NAMES]
        link._streams.update({stream.number: stream for stream in streams})
        leaving, staying = streams
        loop, tasks = asyncio.get_running_loop(), []

        def leave_once() -> None:
            if not tasks:
                tasks.append(None)
                tasks.append(asyncio.Task(leaving.aclose(), loop=loop, eager_start=True))

        leaving.listen(leave_once)
        deltas = [(number, SequenceDelta(name, 0, [5, 6])) for number, name in NAMES]
        link._take_deltas(wire.deltas_message(deltas))
        assert list(link._streams) == [staying.number]
        assert (await anext(staying)).token_ids == [5, 6]
        (leave,) = link._outbox._messages
        assert leave.leave.number == leaving.number

    asyncio.run(run())
