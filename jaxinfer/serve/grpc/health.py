"""Servicer of grpc.health.v1: "" reports liveness of the front end, a service's name reports readiness."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import override

from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthServicer

from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.grpc.rpc import Rpc

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
