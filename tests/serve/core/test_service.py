"""Tests of the core's side of the link over the fake engine: it keeps no state of requests that have ended."""

import asyncio
import time

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.core import messages
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
                core._submit(messages.Submit(number, messages.encode_request(request, time.monotonic())))
            assert len(core._feeds) == 2
            async with asyncio.timeout(20):
                while core._feeds:
                    await asyncio.sleep(0.001)
        kinds = [type(messages.decode_from_core(data)) for data in core._outbox._messages]
        assert (kinds.count(messages.Accepted), kinds.count(messages.Refused)) == (1, 1)

    asyncio.run(run())


def test_bytes_that_are_no_message_end_the_core(caplog):
    async def run() -> None:
        core = _Core(asyncio.get_running_loop())

        async def sent():
            yield messages.encode(messages.Leave(1))
            yield messages.encode(messages.Pulse())  # a message to the front end
            await asyncio.sleep(3600)

        await core._read(sent())
        assert core._left.done()

    asyncio.run(run())
    assert "MessageError" in caplog.text
