"""gRPC servers of a `ServeConfig`: one port for clients and optionally one for operators."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, override

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthServicer
from grpc_reflection.v1alpha import reflection, reflection_pb2

from jaxinfer.protos.v1 import control_pb2, inference_pb2
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.grpc.auth import Authoriser
from jaxinfer.serve.grpc.bounds import Bounds
from jaxinfer.serve.grpc.connections import Connections
from jaxinfer.serve.grpc.control import Control, Engine
from jaxinfer.serve.grpc.inference import Inference
from jaxinfer.serve.grpc.rpc import Observer, Refused, Registrar, Rpc, SlowClients
from jaxinfer.serve.runtime.background import Background
from jaxinfer.serve.runtime.descriptors import OPERATORS
from jaxinfer.serve.runtime.ports import listen
from jaxinfer.serve.settings import ServeConfig, ServeConfigError

METADATA_BYTES = 16 << 10
"""Maximum bytes of a request's metadata; gRPC rejects more with some probability, and twice as much always."""
CONCURRENT_STREAMS = 1024
"""Maximum streams of one connection; a client that needs more waits or opens another connection."""
IDLE_SECONDS = 600.0
"""Seconds without calls until a connection is closed gracefully. gRPC clients reconnect for their next call."""
_KEEPALIVE_TIMEOUT_SECONDS = 20.0
_WINDOW_BYTES = 65535
_PENDING_CALLS = (1 << 31) - 1
"""Maximum pending calls; streams and connections limit them already. gRPC's default, 1000, cancels calls of a burst
without a message, whereas errors of this package have a reason and a retry delay."""

Service = tuple[ServiceDescriptor, object]
"""A service and its servicer, for `jaxinfer.serve.grpc.rpc.Registrar`."""


class GrpcServers:
    """gRPC servers: Inference, health and reflection on one port, Control, health and reflection on another.

    All methods belong to the event loop in which `start` runs.

    Args:
        frontend: returns the front end, or raises `ServeError` while the model is loading.
        more: further services of the first port.
        observer: called at the end of every call.
        refused: called for every error of a call.
        cut: called for every connection that was evicted.

    Attributes:
        port, control_port: listening ports, once started; control_port is None without Control.
    """

    def __init__(
        self,
        config: ServeConfig,
        frontend: Callable[[], Frontend],
        engine: Engine,
        authoriser: Authoriser,
        *,
        more: Sequence[Service] = (),
        observer: Observer | None = None,
        refused: Refused = lambda error, method, caller: None,
        cut: Callable[[], None] = lambda: None,
        background: Background | None = None,
    ) -> None:
        self._background = background or Background()
        self._config, self._frontend, self._engine = config, frontend, engine
        self._slow = SlowClients(config.slow_reader_seconds, config.header_seconds)
        self._connections = Connections({}, cut)
        self._bounds = Bounds(config.limits.message_bytes, config.max_receive_bytes, self._connections)
        self._registrar = Registrar(
            authoriser, self._slow, self._bounds, observer, refused=refused, values=config.limits.values
        )
        self._inference: list[Service] = [(_INFERENCE, Inference(frontend)), *more]
        control = Control(
            frontend, engine, drain_seconds=config.drain_seconds, profiling=config.profile_dir is not None
        )
        self._control: list[Service] = [(_CONTROL, control)]
        self._servers: list[aio.Server] = []
        self._healths: list[Health] = []
        self._watchers: list[asyncio.Task[None]] = []
        self.port = 0
        self.control_port: int | None = None

    @property
    def is_ready(self) -> bool:
        """Whether requests are served now."""
        return self._engine.state == "ready" and self._frontend().is_open

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """Return handlers of the Inference RPCs by name, for use in another gRPC server. They take and return bytes,
        and every call has a stream of requests: see `jaxinfer.serve.grpc.rpc`."""
        service, servicer = self._inference[0]
        return self._registrar.handlers(service, servicer)

    async def start(self) -> None:
        """Start to listen.

        Raises:
            ServeConfigError: a port is not available, or a certificate cannot be read.
        """
        config = self._config
        self._watchers.append(self._background.start("grpc_slow_clients", self._slow.run))
        self.port = await self._serve(self._inference, config.host, "grpc_port", config.max_connections)
        if config.control_port is not None:
            self.control_port = await self._serve(self._control, config.control_host, "control_port", OPERATORS)
        self._watchers.append(self._background.start("grpc_connections", self._connections.run))

    async def stop(self, grace: float) -> None:
        """Accept no more calls, give running calls ``grace`` seconds, then cancel the remaining ones."""
        for health in self._healths:
            health.close()
        await asyncio.gather(*(server.stop(grace) for server in self._servers))
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    async def _serve(self, services: Sequence[Service], host: str, setting: str, connections: int) -> int:
        server = aio.server(options=options_of(self._config, connections))
        health = Health(lambda: self.is_ready, [service.full_name for service, _ in services])
        services = [*services, (_HEALTH, health)]
        names = [service.full_name for service, _ in services] + [_REFLECTION.full_name]
        mirror = reflection.aio.ReflectionServicer(names, _Pools([service.file for service, _ in services]))
        for service, servicer in (*services, (_REFLECTION, mirror)):
            self._registrar.add(server, service, servicer)
        bound = self._bind(server, host, setting)
        await server.start()
        self._connections.most[bound] = connections
        self._servers.append(server)
        self._healths.append(health)
        self._watchers.append(self._background.start("grpc_health", health.run))
        return bound

    def _bind(self, server: aio.Server, host: str, setting: str) -> int:
        port = getattr(self._config, setting)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        listen(host, port, setting).close()  # gRPC itself would report an error twice, also in its own log
        credentials = credentials_of(self._config)
        try:
            if credentials is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, credentials)
        except RuntimeError as error:  # another process took the port meanwhile, or another gRPC error
            raise ServeConfigError(f"{setting}={port}: cannot listen on {host}: {error}") from error


def options_of(config: ServeConfig, connections: int) -> list[tuple[str, Any]]:
    """Return the channel arguments. A client may be silent for a minute while its prompt is processed: idle connections
    are pinged, and clients may ping at any rate. Unread data of a call is limited to one flow control window, which
    does not grow with the measured bandwidth; a message that is read gets a window of its size."""
    ping = int(config.keepalive_seconds * 1000)
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_connection_idle_ms", int(IDLE_SECONDS * 1000)),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
        ("grpc.server_handshake_timeout_ms", int(config.header_seconds * 1000)),
        ("grpc.max_receive_message_length", config.limits.message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES),
        ("grpc.max_concurrent_streams", CONCURRENT_STREAMS),
        ("grpc.server.max_pending_requests", _PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _PENDING_CALLS),
        ("grpc.keepalive_time_ms", ping),
        ("grpc.keepalive_timeout_ms", int(_KEEPALIVE_TIMEOUT_SECONDS * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
    ]


class _Pools:
    """Descriptor lookup for reflection: in the private descriptor pools of services, where other packages cannot define
    the same names, then in the default pool."""

    def __init__(self, files: Sequence[FileDescriptor]) -> None:
        default = descriptor_pool.Default()
        self._pools = [*dict.fromkeys(file.pool for file in files if file.pool is not default), default]

    def FindFileByName(self, name: str) -> Any:  # noqa: N802 - the names of DescriptorPool
        return self._first("FindFileByName", name)

    def FindFileContainingSymbol(self, name: str) -> Any:  # noqa: N802
        return self._first("FindFileContainingSymbol", name)

    def FindMessageTypeByName(self, name: str) -> Any:  # noqa: N802
        return self._first("FindMessageTypeByName", name)

    def FindExtensionByNumber(self, message: Any, number: int) -> Any:  # noqa: N802
        return message.file.pool.FindExtensionByNumber(message, number)

    def FindAllExtensions(self, message: Any) -> Any:  # noqa: N802
        return message.file.pool.FindAllExtensions(message)

    def _first(self, method: str, name: str) -> Any:
        """Look up in all pools. Raises KeyError, like a descriptor pool, if no pool has the name."""
        for pool in self._pools[:-1]:
            try:
                return getattr(pool, method)(name)
            except KeyError:
                continue
        return getattr(self._pools[-1], method)(name)


_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
_CONTROL = control_pb2.DESCRIPTOR.services_by_name["Control"]
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]


LIVENESS = ""
POLL_SECONDS = 0.1
"""Seconds between two readiness checks, which bounds the delay of Watch."""

_SERVING = pb.HealthCheckResponse.SERVING
_NOT_SERVING = pb.HealthCheckResponse.NOT_SERVING
_UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN


class Health(HealthServicer):
    """Health service: Check, List and Watch.

    Readiness is polled, so that code that changes it, in any thread, need not send notifications.

    Args:
        is_ready: whether requests are served now.
        services: service names that report readiness.
    """

    def __init__(self, is_ready: Callable[[], bool], services: Sequence[str]) -> None:
        self._is_ready, self._services = is_ready, tuple(services)
        self._changed = asyncio.Event()
        self._closed = False

    async def run(self) -> None:
        """Wake the watchers when readiness changes, until cancelled."""
        last = self._is_ready()
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if (now := self._is_ready()) != last:
                last = now
                self._wake()

    def close(self) -> None:
        """Report everything as NOT_SERVING from now on, and end all Watch calls after they have sent it."""
        self._closed = True
        self._wake()

    @override
    async def Check(self, request: pb.HealthCheckRequest, rpc: Rpc) -> pb.HealthCheckResponse:
        if (status := self._status(request.service)) == _UNKNOWN:
            raise ServeError(Kind.NOT_FOUND, f"service={request.service!r} is not known here", field="service")
        return pb.HealthCheckResponse(status=status)

    @override
    async def List(self, request: pb.HealthListRequest, rpc: Rpc) -> pb.HealthListResponse:
        names = (LIVENESS, *self._services)
        return pb.HealthListResponse(
            statuses={name: pb.HealthCheckResponse(status=self._status(name)) for name in names}
        )

    @override
    async def Watch(self, request: pb.HealthCheckRequest, rpc: Rpc) -> AsyncIterator[pb.HealthCheckResponse]:
        last = None
        while True:
            changed, closed = self._changed, self._closed
            if (status := self._status(request.service)) != last:
                last = status
                yield pb.HealthCheckResponse(status=status)
            if closed:
                return
            await changed.wait()

    def _status(self, service: str) -> int:
        if service != LIVENESS and service not in self._services:
            return _UNKNOWN
        ready = not self._closed and (service == LIVENESS or self._is_ready())
        return _SERVING if ready else _NOT_SERVING

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


_log = logging.getLogger("jaxinfer.serve")

# mtime, size and inode of the certificate, key and client CA, which change when a file is replaced.
_Stamp = tuple[tuple[int, int, int], ...]


class Certificates:
    """PEM files that are reloaded when one of them changes.

    Args:
        certificate, key: certificate chain and private key of the server.
        client_ca: CA of client certificates; clients must present one if it is set.

    Raises:
        ServeConfigError: a file cannot be read.
    """

    def __init__(self, certificate: str, key: str, client_ca: str | None = None) -> None:
        self._paths = [path for path in (certificate, key, client_ca) if path is not None]
        self._lock = threading.Lock()  # handshakes run in gRPC's own threads
        try:
            self._stamp, self._current = self._read()
        except OSError as error:
            raise ServeConfigError(f"tls: cannot read {error.filename}: {error.strerror}") from error

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            self._current, self.current, require_client_authentication=len(self._paths) > 2
        )

    def current(self) -> grpc.ServerCertificateConfiguration:
        """Return the certificates in the files, or the previous ones if the files cannot be read now."""
        with self._lock:
            try:
                if self._stamps() != self._stamp:
                    self._stamp, self._current = self._read()
                    _log.info("TLS certificates were read again")
            except OSError as error:
                _log.error("TLS certificates stay as they were: %s", error)
            return self._current

    def _read(self) -> tuple[_Stamp, grpc.ServerCertificateConfiguration]:
        stamp = self._stamps()
        certificate, key, *client_ca = (_bytes(path) for path in self._paths)
        return stamp, grpc.ssl_server_certificate_configuration([(key, certificate)], *client_ca)

    def _stamps(self) -> _Stamp:
        stats = [os.stat(path) for path in self._paths]
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)


def credentials_of(config: ServeConfig) -> grpc.ServerCredentials | None:
    """Create credentials from the server's settings; None: no TLS.

    Raises:
        ServeConfigError: a file cannot be read.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    return Certificates(config.tls_cert, config.tls_key, config.tls_client_ca).credentials()


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
