"""`CoreLink` without a core: what it has to say."""

import asyncio

from jaxinfer.serve.core.link import CoreLink
from jaxinfer.types import Request, SamplingParams


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
