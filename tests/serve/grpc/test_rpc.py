"""The adapter of an RPC, on a context without a transport."""

import asyncio
import gc
from typing import Any

import pytest

from jaxinfer.serve.grpc.rpc import Rpc
from jaxinfer.v1 import inference_pb2 as pb


class Leaving:
    """The context of a client that leaves while the initial metadata is sent."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def send_initial_metadata(self, metadata: Any) -> None:
        await self.left.wait()
        raise ConnectionResetError


def test_a_write_cancelled_before_the_client_leaves_is_no_error_of_the_event_loop():
    found = list[dict[str, Any]]()

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
        context = Leaving()
        write = asyncio.ensure_future(Rpc(context, pb.GenerateRequest, 1).write(pb.GenerateResponse()))
        await asyncio.sleep(0)
        write.cancel()
        with pytest.raises(asyncio.CancelledError):
            await write
        context.left.set()
        await asyncio.sleep(0.01)

    asyncio.run(run())
    gc.collect()
    assert found == []
