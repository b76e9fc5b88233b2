"""docs/images.md: its programs run, with a model that has no weights."""

from __future__ import annotations

import asyncio
import pathlib
import re
import threading
from collections.abc import Iterator

import pytest

import jaxinfer
from jaxinfer.models.vision.registry import VISION_FAMILIES
from tests.fake_vision_processor import FakeProcessor
from tests.serve.grpc import running as grpc_server
from tests.serve.http import support as http_server
from tests.serve.vision import LIMITS, fake_images, file_of
from tests.test_llm_images import FakeLLM


@pytest.fixture(scope="module")
def page(repo: pathlib.Path) -> str:
    return (repo / "docs/images.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, int]]:
    """Yield the ports of an HTTP and of a gRPC server by those that the page has."""
    found: dict[str, int] = {}
    ready, ended = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with (
            http_server.serving(vision=fake_images(), limits=LIMITS) as http,
            grpc_server.running(vision=fake_images(), limits=LIMITS) as grpc,
        ):
            found.update({"localhost:8000": http.server.port or 0, "localhost:50051": grpc.servers.port})
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    yield found
    loop.call_soon_threadsafe(ended.set)
    thread.join()
    loop.close()


def test_programs_of_the_page_run(
    page: str,
    ports: dict[str, int],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "cat.png").write_bytes(file_of())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jaxinfer, "LLM", lambda folder: FakeLLM(FakeProcessor()), raising=False)
    blocks, names = re.findall(r"```python\n(.*?)```", page, re.DOTALL), dict[str, object]()
    assert len(blocks) == 4
    for block in blocks:
        for name, port in ports.items():
            block = block.replace(name, f"127.0.0.1:{port}")
        exec(compile(block.replace('model="folder"', 'model="fake"'), "docs/images.md", "exec"), names)
        assert capsys.readouterr().out.strip()


def test_the_page_names_every_architecture(page: str) -> None:
    assert set(re.findall(r"`(\w+ForConditionalGeneration)`", page)) == set(VISION_FAMILIES)
