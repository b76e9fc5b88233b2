"""`Supervisor` as cores tell it of their lives: which failures are final."""

import asyncio

from jaxinfer.internal import core_pb2 as pb
from jaxinfer.serve.core import wire
from jaxinfer.serve.core.supervisor import DEAD, Supervisor
from jaxinfer.serve.settings import ServeConfig
from tests.serve.fake_engine import fake_card


def test_a_start_that_fails_is_final_unless_the_same_settings_were_ready_before():
    async def failure(*before: pb.FromCore) -> tuple[str, str | None]:
        supervisor = Supervisor(ServeConfig(model="fake"))
        for message in (*before, pb.FromCore(failed=pb.Failed(message="no memory"))):
            supervisor._observe(message)
        return supervisor.state, supervisor.failure

    ready = pb.FromCore(ready=pb.Ready(card=wire.card_message(fake_card()), folder="here"))
    assert asyncio.run(failure()) == (DEAD, "no memory")
    assert asyncio.run(failure(ready)) == (DEAD, None)
