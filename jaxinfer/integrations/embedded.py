"""Embedded server without API ports: the proxies of an orchestrator receive the calls and forward them. No jax."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import override

import grpc
from starlette.types import ASGIApp

from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.serve.http.app import build_app
from jaxinfer.serve.http.server import shared
from jaxinfer.serve.server import Server

_log = logging.getLogger("jaxinfer.serve")


class EmbeddedServer(Server):
    """A `Server` without API ports; ``metrics_port`` is opened if it is set.

    The orchestrator is responsible for the limits of connections: their number, timeouts and TLS.
    """

    def app(self) -> ASGIApp:
        """Return the whole HTTP API as an ASGI application: keys, limits and errors are as on a port."""
        return shared(build_app(self._door), self.config.allowed_origins)

    def rpcs(self) -> Mapping[str, grpc.RpcMethodHandler]:
        """Return the handlers of `jaxinfer.v1.Inference`, see `jaxinfer.serve.grpc.server.GrpcServers.handlers`."""
        return self._grpc.handlers()

    async def stats(self) -> EngineStats:
        """Return the engine statistics.

        Raises:
            ServeError: no engine runs.
        """
        return await self._serving().stats()

    @override
    async def _open_doors(self) -> None:
        if self._metrics is not None:
            await self._metrics.start()
            _log.info("metrics listens on port %d", self._metrics.port)

    @property
    @override
    def _addresses(self) -> str:
        return "behind the doors of an orchestrator"
