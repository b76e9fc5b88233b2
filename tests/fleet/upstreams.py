"""A scripted HTTP upstream, which records the requests received."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from tests.fleet.replicas import Ports

type Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclasses.dataclass(frozen=True)
class Asked:
    """A received request, with lower-case header names."""

    path: str
    headers: dict[str, str]
    body: bytes


class Upstream:
    """An upstream that is always ready; ``answer`` handles all requests except health checks.

    Attributes:
        asked: requests received.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer, self.asked = answer, list[Asked]()
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                upstream._take(self)

            def do_POST(self) -> None:
                upstream._take(self)

            def log_message(self, format: str, *args: object) -> None:
                """Suppress log messages."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _take(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("content-length", 0)))
        if request.path == "/ready":
            say(200, b"ready")(request)
            return
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append(Asked(request.path, headers, body))
        self.answer(request)

    @property
    def ports(self) -> Ports:
        """Return the ports; the gRPC port refuses connections."""
        return Ports(self._server.server_address[1], _closed_port())

    def __enter__(self) -> Upstream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def _closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def say(status: int, body: bytes = b"{}") -> Answer:
    """Return a handler that sends this response."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header("content-length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return answer


def late(seconds: float) -> Answer:
    """Return a handler that responds after a delay."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        time.sleep(seconds)
        say(200)(request)

    return answer


def hang_up(request: BaseHTTPRequestHandler) -> None:
    """Close the connection without a response."""
    request.close_connection = True
    request.connection.shutdown(socket.SHUT_RDWR)


def cut(request: BaseHTTPRequestHandler) -> None:
    """Begin a stream, and close the connection within it."""
    request.send_response(200)
    request.send_header("content-type", "text/event-stream")
    request.send_header("transfer-encoding", "chunked")
    request.end_headers()
    request.wfile.write(b"9\r\ndata: 1\n\n\r\n")
    request.wfile.flush()
    hang_up(request)
