"""Tests of the messages of `CoreLink` without a core."""

import asyncio

import grpc
import pytest

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.api.streams import EngineDeadError
from jaxinfer.serve.core import messages
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
        submit, leave = map(messages.decode_to_core, link._outbox._messages)
        assert isinstance(submit, messages.Submit)
        assert leave == messages.Leave(submit.number)
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
        link._take_deltas(messages.deltas_of(deltas))
        assert list(link._streams) == [staying.number]
        assert (await anext(staying)).token_ids == [5, 6]
        assert [*map(messages.decode_to_core, link._outbox._messages)] == [messages.Leave(leaving.number)]

    asyncio.run(run())


@pytest.mark.parametrize("data", [b"", b"\xc1", messages.encode(messages.Stop()), messages.encode(["Accepted", "x"])])
def test_a_core_that_sends_no_message_ends_the_link(tmp_path, data):
    async def serve(incoming, context) -> None:
        await anext(incoming)
        await context.write(data)
        await asyncio.sleep(3600)

    async def run() -> None:
        server, path = grpc.aio.server(), f"{tmp_path}/s"
        handlers = {"Serve": grpc.stream_stream_rpc_method_handler(serve)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("jaxinfer.internal.Core", handlers),))
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        link = CoreLink(path, lambda message: None)
        running = asyncio.ensure_future(link.run())
        with pytest.raises(EngineDeadError):
            await link.submit(Request("me", (1,), SamplingParams()))
        with pytest.raises(messages.MessageError):
            await running
        await server.stop(None)

    asyncio.run(run())
