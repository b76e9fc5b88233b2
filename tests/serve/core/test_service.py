"""Tests of the core's side of the link over the fake engine: it keeps no state of requests that have ended."""

import asyncio
import time

from jaxinfer.protos.internal import core_pb2 as pb
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.core import wire
from jaxinfer.serve.core.async_engine import AsyncEngine
from jaxinfer.serve.core.service import _Core
from jaxinfer.types import Request
from tests.serve.fake_engine import FakeEngine


def test_requests_that_ended_or_were_refused_are_forgotten():
    async def run() -> None:
        core = _Core(asyncio.get_running_loop())
        async with AsyncEngine(FakeEngine()) as engine:
            core._engine = engine
            for number in (1, 2):  # same request id: the second is rejected
                request = Request("me", (3, 4), SamplingParams(n=2, seed=1, max_tokens=300))
                core._submit(pb.Submit(number=number, request=wire.request_message(request, time.monotonic())))
            assert len(core._feeds) == 2
            async with asyncio.timeout(20):
                while core._feeds:
                    await asyncio.sleep(0.001)
        kinds = [message.WhichOneof("kind") for message in core._outbox._messages]
        assert (kinds.count("accepted"), kinds.count("refused")) == (1, 1)

    asyncio.run(run())
