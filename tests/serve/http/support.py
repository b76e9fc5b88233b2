"""A real HTTP server on a free port, over the front end and the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import pathlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import httpx
import openai
from starlette.routing import BaseRoute

from jaxinfer.serve.api.auth import Authoriser
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.core.async_engine import AsyncEngine
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.frontend.images import Images
from jaxinfer.serve.frontend.loras import LoRAs
from jaxinfer.serve.frontend.operations import Operations
from jaxinfer.serve.http.app import build_app
from jaxinfer.serve.http.app_state import AppState
from jaxinfer.serve.http.server import HttpServer
from jaxinfer.serve.settings import ServeConfig
from tests.lora.fakes import Folders, make_store
from tests.serve.fake_engine import FakeEngine, Mischief, fake_card, fake_template, fake_tokenizer
from tests.serve.fake_weights import FakeWeights, Operable
from tests.serve.vision import NEEDS, vision_card, vision_template, vision_tokenizer

BOUND = 20.0  # seconds; a test that waits longer fails


@dataclasses.dataclass
class Running:
    """A running server and its parts."""

    door: AppState
    server: HttpServer
    engine: AsyncEngine | None = None
    routes: Sequence[BaseRoute] = ()
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server.port}"

    @property
    def frontend(self) -> Frontend:
        assert self.door.frontend is not None
        return self.door.frontend

    def openai(self, **settings: Any) -> openai.AsyncOpenAI:
        given = {"api_key": "none", "max_retries": 0, "timeout": BOUND, **settings}
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **given)

    def http(self, **settings: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=BOUND, **settings)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.server.port)

    async def quiet(self) -> None:
        """Wait until no page is held and nothing runs."""
        assert self.engine is not None
        while True:
            stats = await self.engine.stats()
            assert stats.kv is not None
            if not (stats.running or sum(stats.waiting.values()) or stats.kv.held or self.frontend.active):
                return
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(
    mischief: Mischief | None = None,
    *,
    keys: pathlib.Path | None = None,
    limits: ServeLimits | None = None,
    engine: dict[str, Any] | None = None,
    folders: Folders | None = None,
    root: pathlib.Path | None = None,
    operated: bool = True,
    vision: Images | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """Yield a server. ``engine``: fields of `EngineConfig`; ``settings``: fields of `ServeConfig`; ``folders``: adapter
    folders, with the ``root`` below which they are loaded; ``vision``: the model reads images, by `tests.serve.vision`.
    """
    limits = ServeLimits() if limits is None else limits
    config = ServeConfig(model="fake", http_port=0, limits=limits, **settings)
    store = None if folders is None else make_store(folders)[0]
    own = {"enable_lora": store is not None, "images": vision and NEEDS, **(engine or {})}
    fake = FakeEngine(mischief or Mischief(), loras=store, **own)
    async with AsyncEngine(fake, weights=FakeWeights(fake)) as backend:
        card, loras = fake_card(fake.config), None
        if store is not None:
            loras = LoRAs(backend, root=root)
            await loras.restore(backend, card.name)
        texts = (fake_tokenizer(), fake_template()) if vision is None else (vision_tokenizer(), vision_template())
        card = card if vision is None else vision_card(fake.config)
        frontend = Frontend(backend, card, *texts, limits, loras=loras, images=vision)
        operations = Operations(Operable(backend), config.weights_root and pathlib.Path(config.weights_root))
        door = AppState("1.2.3", limits, Authoriser(keys), frontend, operated=operated, operations=operations)
        async with listening(config, door, frontend, backend) as started:
            yield started


@contextlib.asynccontextmanager
async def listening(
    config: ServeConfig, door: AppState, frontend: Frontend, backend: AsyncEngine
) -> AsyncIterator[Running]:
    """Yield a running server for this `AppState`."""
    app = build_app(door)
    server = HttpServer(config, door, app)
    await server.start()
    try:
        yield Running(door, server, backend, app.inner.routes)
    finally:
        await server.stop()
        await frontend.aclose()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test on its own event loop, with a time limit."""
    asyncio.run(asyncio.wait_for(test(), BOUND + 10))


def events(text: str) -> list[dict[str, Any] | str]:
    """Return the data of server-sent events."""
    found: list[dict[str, Any] | str] = []
    for event in text.strip().split("\n\n"):
        data = event.split("data: ", 1)[1]
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


async def raw(running: Running, request: bytes) -> bytes:
    """Return everything that the server sends until it closes the connection."""
    reader, writer = await running.connect()
    writer.write(request)
    await writer.drain()
    answer = await asyncio.wait_for(reader.read(), BOUND)
    writer.close()
    return answer


def post(path: str, body: bytes, *headers: str) -> bytes:
    """Return a request with this body and ``Connection: close``."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "Content-Type: application/json", *headers, "", ""]).encode() + body
