"""Tests of keep-alive signals in waiting streams: a comment, or Anthropic's event."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest

from tests.serve.fake_engine import FakeEngine, Mischief
from tests.serve.http.support import BOUND, Running, run, serving

HI: Any = [{"role": "user", "content": "Hi"}]
PATHS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "Hi"}, ": waiting"),
    ("/v1/chat/completions", {"messages": HI}, ": waiting"),
    ("/v1/responses", {"input": HI}, ": waiting"),
    ("/v1/messages", {"messages": HI}, 'event: ping\ndata: {"type":"ping"}'),
]


def released(running: Running) -> None:
    assert running.engine is not None
    engine = running.engine._engine
    assert isinstance(engine, FakeEngine)
    engine.release()


@pytest.mark.parametrize(("path", "fields", "sign"), PATHS)
def test_a_stream_that_waits_gives_signs_of_life(path: str, fields: dict[str, Any], sign: str) -> None:
    async def test() -> None:
        async with serving(Mischief(hang_at=1, eos_after=3)) as running, running.http() as client:
            running.door.stream_ping_seconds = 0.02
            most = {"max_output_tokens" if path.endswith("responses") else "max_tokens": 9}
            seen = ""
            async with client.stream("POST", path, json={**fields, **most, "stream": True}) as answer:
                async for text in answer.aiter_text():
                    seen += text
                    if seen.count(sign) >= 3:
                        released(running)
            events = seen.strip().split("\n\n")
            assert seen.count(sign) >= 3
            assert all(event == sign for event in events if event.startswith(":"))
            assert any(word in seen for word in ('"stop"', "end_turn", "response.completed"))  # the stream continued

    run(test)


def test_a_stream_that_does_not_wait_has_none() -> None:
    async def test() -> None:
        async with serving(Mischief(eos_after=3)) as running, running.http() as client:
            answer = await client.post("/v1/completions", json={"prompt": "Hi", "stream": True})
            assert ": waiting" not in answer.text

    run(test)


def test_clients_do_not_notice() -> None:
    async def test() -> None:
        async with serving(Mischief(hang_at=1, eos_after=3)) as running:
            running.door.stream_ping_seconds = 0.02
            asyncio.get_running_loop().call_later(0.3, released, running)
            url = running.url
            async with (
                anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=BOUND) as client,
                client.messages.stream(model="fake", max_tokens=9, messages=HI) as stream,
            ):
                assert (await stream.get_final_message()).stop_reason == "end_turn"

    run(test)
