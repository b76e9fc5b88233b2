"""SMG, a third-party router, in front of replicas, with clients that detect missing output."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx

from tests.serve.processes import BOUND, wait_until

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_FAST = [  # for fast detection of workers that die or return
    *("--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--health-success-threshold", "1"),
    *("--policy", "round_robin"),
]


class Router:
    """A running router.

    Args:
        workers: gRPC targets, as host:port.
    """

    def __init__(self, program: pathlib.Path, workers: Sequence[str], log: pathlib.Path, *options: str) -> None:
        self.port, metrics = free_ports(2)
        self.url, self._log = f"http://127.0.0.1:{self.port}", log
        urls = [f"grpc://{worker}" for worker in workers]
        addresses = ["--host", "127.0.0.1", "--port", str(self.port), "--prometheus-port", str(metrics)]
        command = [program, "launch", *addresses, "--prometheus-host", "127.0.0.1", "--worker-urls", *urls]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *_FAST, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def log(self) -> str:
        return _COLOURS.sub("", self._log.read_text(errors="replace"))

    def workers(self) -> dict[str, bool]:
        """Return the health of the workers with a known model, by URL."""
        with contextlib.suppress(httpx.HTTPError, KeyError):
            found = httpx.get(f"{self.url}/workers", timeout=BOUND).json()["workers"]
            return {each["url"]: each["is_healthy"] for each in found if each["model_id"] != "unknown"}
        return {}

    def until_routing(self, count: int) -> None:
        """Wait until the router has ``count`` workers and a tokenizer."""
        wait_until(lambda: self.process.poll() is not None or sum(self.workers().values()) >= count)
        wait_until(lambda: self.process.poll() is not None or "Successfully loaded tokenizer" in self.log())
        assert self.process.poll() is None, self.log()

    def kill(self) -> None:
        """Kill the router and its child processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def routing(
    program: pathlib.Path, workers: Sequence[str], log: pathlib.Path, *options: str, ready: bool = True
) -> Iterator[Router]:
    """Yield a router; if ``ready``, wait until it serves all ``workers``."""
    router = Router(program, workers, log, *options)
    try:
        if ready:
            router.until_routing(len(workers))
        yield router
    finally:
        router.kill()


def free_ports(count: int) -> list[int]:
    """Return unused ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@dataclasses.dataclass
class Stream:
    """Output of one request, as received by a client.

    Attributes:
        status: HTTP status; None: no response.
        reason: finish reason.
        done: the last event was received.
        error: error of the server or of the transport.
    """

    body: Mapping[str, Any]
    status: int | None = None
    text: str = ""
    reason: str | None = None
    done: bool = False
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.status == 200 and self.error is None and self.done and self.reason in ("stop", "length")

    @property
    def fate(self) -> str:
        """Return "complete", "error" (the client knows that output is missing) or "cut" (it cannot know)."""
        if self.is_complete:
            return "complete"
        told = self.error is not None or self.reason in ("abort", "error") or (self.status or 0) >= 400
        return "error" if told else "cut"

    async def run(self, client: httpx.AsyncClient, path: str, changed: Callable[[], None] = lambda: None) -> Stream:
        try:
            async with client.stream("POST", path, json={**self.body, "stream": True}) as response:
                self.status = response.status_code
                if response.status_code != 200:
                    self.error = (await response.aread()).decode()
                    return self
                async for line in response.aiter_lines():
                    self._take(line)
                    changed()
        except httpx.HTTPError as error:
            self.error = f"{type(error).__name__}: {error}"
        return self

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                self.error = json.dumps(event["error"])
            for choice in event.get("choices", ()):
                self.text += choice["text"] if "text" in choice else choice.get("delta", {}).get("content") or ""
                self.reason = choice.get("finish_reason") or self.reason


class Crowd:
    """Concurrent streams of one client.

    Attributes:
        streams: output of each stream so far.
    """

    def __init__(self, url: str, path: str, bodies: Sequence[Mapping[str, Any]]) -> None:
        self.streams = [Stream(body) for body in bodies]
        self._url, self._path = url, path
        self._changed = asyncio.Event()

    async def run(self) -> list[Stream]:
        limits = httpx.Limits(max_connections=len(self.streams))
        async with httpx.AsyncClient(base_url=self._url, timeout=BOUND, limits=limits) as client:
            runs = (stream.run(client, self._path, self._changed.set) for stream in self.streams)
            return list(await asyncio.gather(*runs))

    async def until(self, condition: Callable[[Stream], bool], share: float = 1.0) -> None:
        """Wait until the condition holds for this share of the streams."""
        async with asyncio.timeout(BOUND):
            while sum(condition(stream) for stream in self.streams) < share * len(self.streams):
                self._changed.clear()
                await self._changed.wait()
