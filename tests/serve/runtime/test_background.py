"""Tests of background tasks: each task of a server fails once and continues."""

from __future__ import annotations

import asyncio
import functools
import logging
import pathlib
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from jaxinfer.serve.api.auth import Authoriser, key_entry
from jaxinfer.serve.grpc.connections import Connections
from jaxinfer.serve.grpc.rpc import SlowClients
from jaxinfer.serve.grpc.server import Health
from jaxinfer.serve.http.server import HttpServer
from jaxinfer.serve.kv_events.publisher import Publisher
from jaxinfer.serve.runtime import background, malloc_trim
from jaxinfer.serve.runtime.background import TOLERATED, Background
from jaxinfer.serve.telemetry.throughput import Throughput
from tests.serve.live import Live, live_fake
from tests.serve.processes import wait_until

TASKS: dict[str, tuple[Any, str]] = {
    "api_keys": (Authoriser, "run"),
    "grpc_connections": (Connections, "run"),
    "grpc_health": (Health, "run"),
    "grpc_slow_clients": (SlowClients, "run"),
    "http_connections": (HttpServer, "_sweep"),
    "kv_events_replay": (Publisher, "_answer"),
    "throughput": (Throughput, "run"),
}
"""Method that each task runs, by the name of the task."""


def failing(work: Callable[..., Any], times: int = 1) -> Callable[..., Any]:
    left = iter(range(times))

    @functools.wraps(work)
    async def wrapped(*arguments: Any) -> None:
        if next(left, None) is not None:
            raise RuntimeError("planted")
        await work(*arguments)

    return wrapped


def test_each_task_of_a_server_fails_once_and_goes_on(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "FIRST_PAUSE", 0.01)
    for owner, name in TASKS.values():
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    keys = tmp_path / "keys.yaml"
    keys.write_text(key_entry("k" * 40, "alice", ["infer", "observe"]))
    events = {"kv_events_endpoint": "off", "kv_events_replay_endpoint": "tcp://127.0.0.1:0", "kv_events": True}
    with live_fake(tmp_path / "model", api_keys=str(keys), control_port=0, **events) as run:
        failures = run.server.background.failures
        assert set(TASKS) == set(failures)
        wait_until(lambda: all(failures.values()))
        assert max(failures.values()) == 1
        assert run.server.is_ready
        request = urllib.request.Request(f"{run.url}/metrics", headers={"authorization": f"Bearer {'k' * 40}"})
        with urllib.request.urlopen(request, timeout=60) as page:
            assert 'jaxinfer:background_task_failures_total{task="api_keys"} 1.0' in page.read().decode()


def test_what_does_not_recover_makes_the_server_not_ready(tmp_path: pathlib.Path) -> None:
    with live_fake(tmp_path) as run:
        times = TOLERATED + 1
        _start(run, failing(asyncio.sleep, times))
        wait_until(lambda: run.server.background.failures["planted"] == times)
        assert run.server.background.broken == ["planted"]
        assert not run.server.is_ready


def _start(run: Live, work: Callable[[float], Any]) -> None:
    run.server.background._pause = 0.001
    run.loop.call_soon_threadsafe(run.server.background.start, "planted", lambda: work(600.0))


def test_a_task_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "STEADY_SECONDS", 0.01)

    async def story() -> None:
        tasks = Background(pause=0.001)
        task = tasks.start("planted", lambda: failing_often(600.0))
        while tasks.failures["planted"] <= TOLERATED or tasks.broken:
            await asyncio.sleep(0.001)
        task.cancel()

    failing_often = failing(asyncio.sleep, TOLERATED + 1)
    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_failure_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        await Background(pause=0.001).start("planted", lambda: work(0.0))

    work = failing(asyncio.sleep)
    with caplog.at_level(logging.ERROR, "jaxinfer.serve"):
        asyncio.run(story())
    (record,) = caplog.records
    assert "'planted'" in record.getMessage()
    assert record.exc_info is not None


def test_the_process_has_its_own_task() -> None:
    """The task of `heap.tidy` belongs to the process, which may contain several servers."""

    async def story() -> None:
        tasks = Background(pause=0.001)
        task = tasks.start("heap", lambda: work(lambda: 0))
        while not tasks.failures["heap"]:
            await asyncio.sleep(0.001)
        assert not task.done()
        task.cancel()

    work = failing(malloc_trim.tidy)
    asyncio.run(asyncio.wait_for(story(), 60))
