"""Servers for tests of blocking clients, in a thread with its own event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import grpc

from jaxinfer.v1 import inference_pb2 as pb
from tests.serve.fake_engine import FIRST_BYTE, Mischief, expected_text
from tests.serve.grpc.running import Running, running

SEED = 5


class Served:
    """A real server over the fake engine. ``target``: its address."""

    def __init__(self, run: Running, loop: asyncio.AbstractEventLoop) -> None:
        self.run, self._loop = run, loop
        self.target = f"127.0.0.1:{run.servers.port}"

    def call[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    def baseline(self) -> None:
        """Wait until nothing runs and no page is held."""
        self.call(self.run.baseline())


@contextlib.contextmanager
def served(mischief: Mischief | None = None, **how: Any) -> Iterator[Served]:
    """Yield a server, see `tests.serve.grpc.running.running`."""
    started: concurrent.futures.Future[Served] = concurrent.futures.Future()
    ending: list[asyncio.Event] = []

    async def main() -> None:
        async with running(mischief or Mischief(), **how) as run:
            ending.append(asyncio.Event())
            started.set_result(Served(run, asyncio.get_running_loop()))
            await ending[0].wait()

    def thread_main() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            raise

    thread = threading.Thread(target=thread_main, daemon=True)
    thread.start()
    server = started.result(20)
    try:
        yield server
    finally:
        server._loop.call_soon_threadsafe(ending[0].set)
        thread.join(20)
        assert not thread.is_alive()


@contextlib.contextmanager
def scripted(**methods: Callable[[Any, grpc.ServicerContext], Any]) -> Iterator[str]:
    """Yield the address of a server with scripted methods of Inference (generators, because all of them stream)."""
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(8))
    handlers = {
        name: (
            grpc.stream_stream_rpc_method_handler if name == "GenerateBatch" else grpc.unary_stream_rpc_method_handler
        )(method, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString)
        for name, method in methods.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("jaxinfer.v1.Inference", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def expected(prompt: str, count: int, index: int = 0) -> str:
    """Return the fake engine's text for a prompt under `SEED`."""
    return expected_text([FIRST_BYTE + byte for byte in prompt.encode()], SEED, index, count)
