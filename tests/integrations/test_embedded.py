"""Tests of a server embedded in an existing gRPC server and ASGI app, over the fake core."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator

import httpx
import pytest

from jaxinfer.integrations.embedded import EmbeddedServer
from jaxinfer.protos.v1 import inference_pb2
from jaxinfer.serve.api.errors import ServeError
from jaxinfer.serve.settings import ServeConfig
from tests.serve.core.fake_core import command
from tests.serve.fake_engine import expected_text, fake_tokenizer, write_fake_folder


@contextlib.asynccontextmanager
async def embedded(folder: pathlib.Path, **settings: object) -> AsyncIterator[tuple[EmbeddedServer, httpx.AsyncClient]]:
    config = ServeConfig(**{"model": "fake", "http_port": None, **settings})
    server = EmbeddedServer(config, command("--folder", str(write_fake_folder(folder))))
    transport = httpx.ASGITransport(app=server.app())
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://embedded") as client:
            yield server, client
    finally:
        await server.stop()


def test_its_application_answers_and_no_port_is_open_but_that_of_metrics(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        async with embedded(tmp_path, metrics_port=0, allowed_origins=("https://a.example",)) as (server, client):
            assert (await client.get("/ready")).status_code == 503
            with pytest.raises(ServeError, match="loading"):
                await server.stats()
            await server.start()
            await server.until_ready()
            asked = {"model": "fake", "prompt": "Hi", "max_tokens": 9, "seed": 4}
            answer = await client.post("/v1/completions", json=asked, headers={"origin": "https://a.example"})
            assert answer.json()["choices"][0]["text"] == expected_text(fake_tokenizer().encode("Hi"), 4, 0, 9)
            assert answer.headers["access-control-allow-origin"] == "https://a.example"
            assert (await server.stats()).generated_tokens == 9
            assert (server.grpc_port, server.http_port, server.control_port) == (0, None, None)
            async with httpx.AsyncClient() as outside:
                found = await outside.get(f"http://127.0.0.1:{server.metrics_port}/metrics")
            assert "jaxinfer:generation_tokens_total" in found.text

    asyncio.run(story())


def test_its_rpcs_are_those_of_inference(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        async with embedded(tmp_path) as (server, _):
            service = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
            assert server.rpcs().keys() == {method.name for method in service.methods}

    asyncio.run(story())
