"""HTTP server: uvicorn in the process's event loop. It installs no signal handlers; the caller does."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from jaxinfer.serve.api.ignored import HEADER
from jaxinfer.serve.http.app import build_app, build_metrics_app
from jaxinfer.serve.http.app_state import AppState
from jaxinfer.serve.http.connection import Bounds, Connection
from jaxinfer.serve.http.connection_eviction import Idle
from jaxinfer.serve.runtime.background import Background
from jaxinfer.serve.runtime.descriptors import OPERATORS
from jaxinfer.serve.runtime.ports import listen
from jaxinfer.serve.settings import ServeConfig, ServeConfigError

KEEP_ALIVE_SECONDS = 75
"""Seconds for which an idle connection is kept: longer than clients keep connections, so that clients close first."""

_BACKLOG = 2048
_WASTE = 4  # times the body limit: a client that sends no more than that can read the error response
_CLOSING_SECONDS = 0.2  # shutdown timeout for idle connections


class HttpServer:
    """HTTP server for a `AppState`.

    Args:
        config: ``host``, ``http_port``, TLS files, ``max_connections``, ``header_seconds``,
            ``slow_reader_seconds``, ``allowed_origins`` and ``limits``.
        app: application to serve instead of the default, e.g. a wrapper around it.
        metrics: serve `build_metrics_app` on ``metrics_host`` and ``metrics_port`` instead.

    Raises:
        ServeConfigError: the TLS files cannot be used.
    """

    def __init__(
        self,
        config: ServeConfig,
        door: AppState,
        app: ASGIApp | None = None,
        *,
        metrics: bool = False,
        background: Background | None = None,
    ) -> None:
        self._config, self._door, self._background = config, door, background or Background()
        self._tls = ReloadingContext(config) if config.tls_cert is not None else None
        self._metrics = metrics
        own = (build_metrics_app if metrics else build_app)(door) if app is None else app
        self._server = _Server(self._settings(own if metrics else shared(own, config.allowed_origins)))
        self._tasks: list[asyncio.Task[None]] = []
        self._port: int | None = None

    @property
    def port(self) -> int:
        """Port that the server listens on."""
        assert self._port is not None, "the server is not started"
        return self._port

    async def start(self) -> None:
        """Start the server and return once it listens.

        Raises:
            ServeConfigError: the address cannot be used.
        """
        config = self._config
        if self._metrics:
            listener = _listen(config.metrics_host, config.metrics_port or 0, "metrics_port")
        else:
            listener = _listen(config.host, config.http_port or 0, "http_port")
        self._port = listener.getsockname()[1]
        serving = asyncio.ensure_future(self._server.serve([listener]))
        listening = asyncio.ensure_future(self._server.listening.wait())
        await asyncio.wait((serving, listening), return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if serving.done():
            serving.result()
        self._tasks = [serving, self._background.start("http_connections", self._sweep)]

    async def stop(self, grace: float = 0.0) -> None:
        """Accept no more connections, give running responses ``grace`` seconds, then abort the remaining ones."""
        if not self._tasks:
            return
        serving, sweeping = self._tasks
        self._tasks = []
        self._server.config.timeout_graceful_shutdown = max(grace, _CLOSING_SECONDS)  # type: ignore[assignment]
        self._server.should_exit = True
        await serving
        sweeping.cancel()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        await asyncio.gather(sweeping, *self._server.server_state.tasks, return_exceptions=True)

    def _settings(self, app: ASGIApp) -> uvicorn.Config:
        config = self._config
        bounds = Bounds(
            connections=OPERATORS if self._metrics else config.max_connections,
            waste_bytes=_WASTE * config.limits.message_bytes,
            read_seconds=config.header_seconds,
            stall_seconds=config.slow_reader_seconds,
        )
        settings = uvicorn.Config(
            app,
            http=functools.partial(Connection, bounds=bounds, waiting=Idle(), cut=self._cut),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            backlog=_BACKLOG,
        )
        settings.load()
        settings.ssl = self._tls
        return settings

    def _cut(self, reason: str) -> None:
        self._door.metrics.http_cut.labels(reason).inc()

    async def _sweep(self) -> None:
        """Sweep the connections several times within the shortest timeout, at least once per second."""
        shortest = min(self._config.header_seconds, self._config.slow_reader_seconds)
        while True:
            await asyncio.sleep(min(1.0, shortest / 4))
            now = time.monotonic()
            for connection in list(self._server.server_state.connections):
                assert isinstance(connection, Connection)
                connection.sweep(now)
            self.reload()

    def reload(self) -> None:
        """Reload the certificate if its file has changed."""
        if self._tls is not None:
            self._tls.reload()


def shared(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Allow web pages of these origins to use ``app`` (CORS). CORS is handled before keys are checked, because browsers
    send preflight requests without the key. Keys are sent in a header, never in a cookie, so a page cannot use another
    page's key."""
    if not origins:
        return app
    methods, shown = ("GET", "POST"), ("x-request-id", "request-id", "retry-after", "retry-after-ms", HEADER)
    return CORSMiddleware(app, origins, methods, allow_headers=("*",), expose_headers=shown)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int, name: str) -> socket.socket:
    listener = listen(host, port, name, _BACKLOG)
    # Inherited by connections. asyncio sets TCP_NODELAY only if the socket names its protocol, which this one does not;
    # without it every second write waits for the client's delayed ACK, 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


_log = logging.getLogger("jaxinfer.serve")


class ReloadingContext(ssl.SSLContext):
    """Server TLS context that creates each connection with the most recently loaded certificates.

    Args:
        config: ``tls_cert``, ``tls_key`` and, for required client certificates, ``tls_client_ca``.

    Raises:
        ServeConfigError: the files cannot be used.
    """

    def __new__(cls, config: ServeConfig) -> ReloadingContext:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._seen = self._stamps()
        self._current = self._read()

    def reload(self) -> bool:
        """Reload the files if they changed. Files that cannot be used are logged, and the previous certificate stays in
        use."""
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        self._seen = stamps
        try:
            self._current = self._read()
        except ServeConfigError as error:
            _log.error("%s; the former certificate stays in use", error)
            return False
        _log.info("read the TLS files again")
        return True

    def wrap_bio(self, *args: Any, **settings: Any) -> ssl.SSLObject:
        return self._current.wrap_bio(*args, **settings)

    def _read(self) -> ssl.SSLContext:
        config = self._config
        assert config.tls_cert is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(config.tls_cert, config.tls_key)
            if config.tls_client_ca is not None:
                context.load_verify_locations(config.tls_client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as cause:  # covers ssl.SSLError
            names = ", ".join(file for file in self._files())
            raise ServeConfigError(f"tls_cert={config.tls_cert!r}: {names} cannot be used: {cause}") from cause
        return context

    def _files(self) -> list[str]:
        named = (self._config.tls_cert, self._config.tls_key, self._config.tls_client_ca)
        return [name for name in named if name is not None]

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(name) for name in self._files()]


def _stamp(name: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
