"""Tests of a log whose pipe is not read, and of clients that cause a line per request."""

import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from jaxinfer.serve.runtime import logs
from jaxinfer.serve.runtime.logs import BURST, PER_SECOND, QUEUE_BYTES, QueueHandler, RateLimit, write_to
from tests.serve.core.fake_core import REPO
from tests.serve.fake_engine import write_fake_folder
from tests.serve.processes import BOUND, fake_server, is_alive, wait_until

BAD = b"\x16\x03\x01 no HTTP\r\n\r\n"
MANY = 3000


class Gate:
    """A sink that blocks until it is opened."""

    def __init__(self) -> None:
        self.open, self.entered, self.lines = threading.Event(), threading.Event(), []

    def write(self, data: bytes) -> None:
        self.entered.set()
        self.open.wait()
        self.lines.append(data.decode())


@contextlib.contextmanager
def handler_of(sink, **changes):
    handler = QueueHandler(sink.write, **changes)
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
    try:
        yield handler
    finally:
        handler.close()


def record(message: str, *args, name: str = "a", level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord(name, level, "here", 1, message, args, None)


def test_nobody_waits_for_a_sink_that_takes_nothing_and_what_is_left_out_is_told():
    gate = Gate()
    with handler_of(gate) as handler:
        handler.handle(record("first"))
        assert gate.entered.wait(BOUND)
        for kind in range(100):  # 100 KiB each, all of different kinds
            handler.handle(record(f"{kind:100000}"))
        waiting = QUEUE_BYTES // 100_000
        assert handler.dropped == {"rate": 0, "queue": 100 - waiting, "write": 0}
        assert handler.drain(0.01) is False
        gate.open.set()
        assert handler.drain(BOUND)
        handler.handle(record("last"))
        assert handler.drain(BOUND)
    assert len(gate.lines) == 1 + waiting + 2
    told = "WARNING 89 lines were left out: those before them were not read in time\n"
    assert any(line.endswith(told.replace("89", str(100 - waiting))) for line in gate.lines)
    assert gate.lines[0] == "a INFO first\n"
    assert "a INFO last\n" in gate.lines


def test_a_kind_is_limited_and_no_other_and_its_number_is_told():
    gate, now = Gate(), [0.0]
    gate.open.set()
    with handler_of(gate, limit=RateLimit(lambda: now[0])) as handler:
        for number in range(1000):
            handler.handle(record("request %d is bad", number, level=logging.WARNING))
        handler.handle(record("another"))
        handler.handle(record("request %d is bad", 7, name="b", level=logging.WARNING))
        assert handler.drain(BOUND)
        assert handler.dropped == {"rate": 1000 - BURST, "queue": 0, "write": 0}
        assert gate.lines[:BURST] == [f"a WARNING request {number} is bad\n" for number in range(BURST)]
        assert gate.lines[BURST:] == [
            "a INFO another\n",
            "b WARNING request 7 is bad\n",
            f"a WARNING {1000 - BURST} more lines were left out that are like 'request %d is bad'\n",
        ]
        now[0] += 2.5
        for number in range(1000):
            handler.handle(record("request %d is bad", number, level=logging.WARNING))
        assert handler.dropped["rate"] == 2000 - BURST - int(2.5 * PER_SECOND)


def test_lines_for_debugging_are_all_there():
    gate = Gate()
    gate.open.set()
    with handler_of(gate) as handler:
        for number in range(3 * BURST):
            handler.handle(record("step %d", number, level=logging.DEBUG))
        assert handler.drain(BOUND)
    assert len(gate.lines) == 3 * BURST


def test_kinds_are_bounded_and_those_beyond_are_limited_together():
    now = [0.0]
    limiter = RateLimit(lambda: now[0])
    admitted = sum(limiter.filter(record(f"a client's own words {number}")) for number in range(10_000))
    assert admitted == logs._KINDS + BURST
    assert len(limiter._kinds) == logs._KINDS + 1
    now[0] += 3600.0
    assert limiter.filter(record("another, when all of them are over"))
    assert len(limiter._kinds) == 2, "that, and the one of which lines were left out"


def test_a_sink_that_fails_loses_lines_and_nothing_else():
    class Broken:
        def write(self, data: bytes) -> None:
            raise BrokenPipeError

    with handler_of(Broken()) as handler:
        for _ in range(3):
            handler.handle(record("x"))
        assert handler.drain(BOUND)
        assert handler.dropped == {"rate": 0, "queue": 0, "write": 3}


@pytest.mark.parametrize("blocking", [True, False])
def test_a_pipe_gets_every_byte_whether_it_blocks_or_not(blocking):
    reading, writing = os.pipe()
    os.set_blocking(writing, blocking)
    data = b"0123456789abcdef" * 20_000
    writer = threading.Thread(target=write_to, args=(writing, data))
    writer.start()
    got = b""
    while len(got) < len(data):
        got += os.read(reading, 1 << 16)
    writer.join(BOUND)
    os.close(reading)
    os.close(writing)
    assert got == data


# ---- servers


def malformed(port: int, count: int) -> int:
    """Send ``count`` malformed HTTP requests; return how many got status 400."""
    answered = 0
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", port), timeout=BOUND) as client:
            client.sendall(BAD)
            answered += client.recv(64).startswith(b"HTTP/1.1 400")
    return answered


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def health(port: int) -> int:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        client.request("GET", "/ready")
        return client.getresponse().status
    except OSError:
        return 0
    finally:
        client.close()


def test_a_server_whose_log_nobody_reads_answers_all_the_same(tmp_path):
    """A server answers although its log pipe is full; logging in the loop blocked after 816 malformed requests."""
    port, folder = free_port(), str(write_fake_folder(tmp_path / "model"))
    settings = json.dumps({"model": "fake", "grpc_port": 0, "http_port": port})
    run = [sys.executable, "-m", "tests.serve.processes", settings, "--folder", folder]
    server = subprocess.Popen(run, cwd=REPO, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    try:
        wait_until(lambda: health(port) == 200)
        assert malformed(port, MANY) == MANY
        assert health(port) == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(BOUND) == 0
    finally:
        server.kill()
        server.wait()
        assert server.stderr is not None
        server.stderr.close()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_flood_of_malformed_requests_is_counted(tmp_path, form):
    with fake_server(tmp_path, log_format=form) as server:
        assert malformed(server.http_port, 1000) == 1000
        with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/metrics", timeout=30) as answer:
            figures = answer.read().decode()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    lines = [line for line in server.log().splitlines() if "Invalid HTTP request received" in line]
    assert BURST < len(lines) < 900
    left_out = int(figures.partition('log_lines_dropped_total{reason="rate"} ')[2].partition(".")[0])
    assert left_out > 100
    assert any("more lines were left out that are like" in line for line in lines)
    if form == "json":
        assert {json.loads(line)["logger"] for line in lines} == {"uvicorn.error"}


def test_a_core_whose_log_nobody_reads_gets_on(tmp_path):
    """A core that shares the front end's stderr continues although the pipe is full; the core process logs itself."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 512)
    os.set_blocking(writing, True)
    program = "import logging; from jaxinfer.serve.runtime import logs; logs.configure('text', 'info')\n"
    program += "for k in range(5000): logging.getLogger('a').warning('line %d ' + str(k % 50) * 99, k)\n"
    program += "from jaxinfer.serve.core.process import _exit; _exit(7)"
    start = time.monotonic()
    core = subprocess.Popen([sys.executable, "-c", program], cwd=REPO, stderr=writing)
    try:
        assert core.wait(BOUND) == 7
        assert time.monotonic() - start < BOUND
        assert not is_alive(core.pid)
    finally:
        core.kill()
        core.wait()
        os.close(reading)
        os.close(writing)
