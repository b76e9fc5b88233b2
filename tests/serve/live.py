"""A whole `Server` in its own thread, for tests of blocking clients."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import pathlib
import threading
from collections.abc import Iterator, Sequence

from jaxinfer.serve.runtime.event_loop import Loop
from jaxinfer.serve.server import Server
from jaxinfer.serve.settings import ServeConfig
from tests.serve.core.fake_core import command
from tests.serve.fake_engine import write_fake_folder

_SECONDS = 240.0  # timeout for operations that take a few seconds on an idle machine


class Live:
    """A running server that is ready."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.server, self.loop = server, loop
        self.ended = asyncio.Event()
        self.target = f"127.0.0.1:{server.grpc_port}"
        self.url = f"http://127.0.0.1:{server.http_port}"


@contextlib.contextmanager
def live(config: ServeConfig, core: Sequence[str] | None = None) -> Iterator[Live]:
    """Yield a server that is ready; ``core``: the command that starts its engine core."""
    started: concurrent.futures.Future[Live] = concurrent.futures.Future()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(config, core, started), loop_factory=Loop), daemon=True)
    thread.start()
    found = started.result(_SECONDS)
    try:
        yield found
    finally:
        found.loop.call_soon_threadsafe(found.ended.set)
        thread.join(_SECONDS)
        assert not thread.is_alive()


@contextlib.contextmanager
def live_fake(folder: pathlib.Path, name: str = "fake", **settings: object) -> Iterator[Live]:
    """Yield a server over the fake core, whose model is called ``name``."""
    config = ServeConfig(**{"model": "fake", "served_model_name": name, "grpc_port": 0, "http_port": 0, **settings})
    with live(config, command("--folder", str(write_fake_folder(folder)))) as found:
        yield found


async def _serve(config: ServeConfig, core: Sequence[str] | None, started: concurrent.futures.Future[Live]) -> None:
    server = Server(config, core)
    try:
        await server.start()
        await server.until_ready()
        found = Live(server, asyncio.get_running_loop())
        started.set_result(found)
        await found.ended.wait()
    except BaseException as error:
        if not started.done():
            started.set_exception(error)
        raise
    finally:
        await server.stop()
