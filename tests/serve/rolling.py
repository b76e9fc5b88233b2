"""A rolling upgrade behind haproxy: `python -m tests.serve.rolling --rounds 10 --requests 5000`.

Two servers over the fake core stand behind haproxy as docs/deploying.md configures it. Clients ask over HTTP, whole and
streamed, and over gRPC, without retries of their own, while one server after the other is stopped by SIGTERM and
started again. Every request that does not get its whole answer counts as lost.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator

import grpc

from jaxinfer.client import Client, ServerError
from tests.serve.core.fake_core import REPO
from tests.serve.fake_engine import write_fake_folder
from tests.serve.processes import ServerProcess, wait_until

HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
DELAY = 2.0
"""Seconds of ``drain_delay``: the checks below notice within half a second."""
_CLIENTS = 6
_BODY = {"model": "fake", "prompt": "once", "max_tokens": 8, "temperature": 0}


def documented() -> str:
    """The configuration that docs/deploying.md shows."""
    page = (REPO / "docs" / "deploying.md").read_text()
    found = re.search(r"```haproxy\n(.*?)```", page, re.DOTALL)
    assert found is not None
    return found[1]


class Fleet:
    """Two servers and haproxy before them.

    Args:
        folder: for models, logs and sockets.
        delay: ``drain_delay`` of both.
    """

    def __init__(self, folder: pathlib.Path, delay: float) -> None:
        self._folder, self._delay = folder, delay
        self._model = write_fake_folder(folder / "model")
        self.http, self.grpc, *ports = _free_ports(6)
        self._ports = {"a": ports[:2], "b": ports[2:]}
        self._starts = itertools.count()
        self._servers = {name: self._started(name) for name in self._ports}
        for server in self._servers.values():  # haproxy takes them for up until its checks have failed
            server.until_logged("ready: ")
        self._status = folder / "haproxy.sock"
        self._haproxy = self._balancer()

    def _balancer(self) -> subprocess.Popen[bytes]:
        text = documented().replace("inter 1s", "inter 200ms")
        for name, host in (("a", "10.0.0.1"), ("b", "10.0.0.2")):
            http_port, grpc_port = self._ports[name]
            text = text.replace(f"{host}:8000", f"127.0.0.1:{http_port}").replace(
                f"{host}:50051", f"127.0.0.1:{grpc_port}"
            )
            text = re.sub(rf"(server {name} .*check port) 8000", rf"\1 {http_port}", text)
        text = text.replace(":8080", f"127.0.0.1:{self.http}").replace(":50050", f"127.0.0.1:{self.grpc}")
        config = self._folder / "haproxy.cfg"
        config.write_text(f"global\n    stats socket {self._status} mode 600\n{text}")
        assert HAPROXY is not None
        with (self._folder / "haproxy.log").open("wb") as log:
            balancer = subprocess.Popen([HAPROXY, "-db", "-f", str(config)], stdout=log, stderr=log)
        wait_until(lambda: self._status.exists() or balancer.poll() is not None)
        assert balancer.poll() is None, (self._folder / "haproxy.log").read_text()
        for name in self._ports:
            wait_until(lambda name=name: self._is_up(name))
        return balancer

    def _started(self, name: str) -> ServerProcess:
        http_port, grpc_port = self._ports[name]
        settings = {"model": "fake", "http_port": http_port, "grpc_port": grpc_port, "drain_delay": self._delay}
        arguments = ["-m", "tests.serve.processes", json.dumps(settings), "--folder", str(self._model)]
        return ServerProcess([*arguments, "--seconds", "0.002"], self._folder / f"{name}{next(self._starts)}.log")

    def restart(self, name: str) -> None:
        """Stop a server as an orchestrator does, start it again, and wait until haproxy sends requests to it."""
        server = self._servers[name]
        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.log()
        wait_until(lambda: not self._is_up(name))
        self._servers[name] = self._started(name)
        wait_until(lambda: self._is_up(name))

    def _is_up(self, name: str) -> bool:
        """Whether both doors of a server are up, as haproxy sees it."""
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(self._status))
            line.sendall(b"show stat\n")
            rows = [row.split(",") for row in line.makefile().read().splitlines()]
        found = [row[17] for row in rows if len(row) > 17 and row[1] == name]
        assert len(found) == 2, rows
        return all(status.startswith("UP") for status in found)

    def end(self) -> None:
        """Leave nothing behind."""
        self._haproxy.kill()
        self._haproxy.wait()
        for server in self._servers.values():
            server.end()


@contextlib.contextmanager
def fleet(folder: pathlib.Path, delay: float = DELAY) -> Iterator[Fleet]:
    """Two servers that are ready behind haproxy."""
    made = Fleet(folder, delay)
    try:
        yield made
    finally:
        made.end()


def roll(fleet: Fleet, requests: int) -> Counter[str]:
    """Restart both servers under load; how the requests ended: "whole", or what was wrong.

    Args:
        requests: that are made at least.
    """
    ended, lock, rolled = Counter[str](), threading.Lock(), threading.Event()

    def client(ask: Iterator[str]) -> None:
        while not (rolled.is_set() and ended.total() >= requests):
            how = next(ask)
            with lock:
                ended[how] += 1

    kinds = [_over_http(fleet.http, stream=False), _over_http(fleet.http, stream=True), _over_grpc(fleet.grpc)]
    asks = [kind() for _, kind in zip(range(_CLIENTS), itertools.cycle(kinds), strict=False)]
    threads = [threading.Thread(target=client, args=(ask,)) for ask in asks]
    for thread in threads:
        thread.start()
    try:
        for name in ("a", "b"):
            fleet.restart(name)
    finally:
        rolled.set()
        for thread in threads:
            thread.join()
    return ended


def _over_http(port: int, *, stream: bool):
    body, headers = json.dumps({**_BODY, "stream": stream}), {"content-type": "application/json"}

    def ask() -> Iterator[str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while True:
            try:
                connection.request("POST", "/v1/completions", body, headers)
                answer = connection.getresponse()
                text = answer.read().decode()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                yield f"http: {type(error).__name__}"
                continue
            whole = text.endswith("data: [DONE]\n\n") if stream else "usage" in text
            yield "whole" if answer.status == 200 and whole else f"http: {answer.status} {text[-120:]}"

    return ask


def _over_grpc(port: int):
    def ask() -> Iterator[str]:
        with Client(f"127.0.0.1:{port}", retry=None, timeout=60) as client:
            while True:
                try:
                    done = client.generate("once", max_tokens=8, temperature=0)
                except (ServerError, grpc.RpcError) as error:
                    yield f"grpc: {error}"
                    continue
                yield "whole" if done.outputs[0].finish_reason else "grpc: cut"

    return ask


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; they are all open at once, so that no two are the same."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=5000, help="of each round, at least")
    parser.add_argument("--drain-delay", type=float, default=DELAY, help="0 shows what is lost without it")
    options, lost = parser.parse_args(), 0
    if HAPROXY is None:
        parser.error("needs haproxy: apt install haproxy, or the like")
    for number in range(1, options.rounds + 1):
        with tempfile.TemporaryDirectory() as folder, fleet(pathlib.Path(folder), options.drain_delay) as servers:
            begun = time.monotonic()
            ended = roll(servers, options.requests)
            seconds = time.monotonic() - begun
        lost += (bad := ended.total() - ended["whole"])
        print(f"round {number}: {bad} of {ended.total()} requests lost in {seconds:.0f} s", flush=True)
        for how, count in ended.items():
            if how != "whole":
                print(f"  {count} x {how}", flush=True)
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
