"""A server whose doors are somebody else's: an orchestrator's proxies take the calls, and bring them here. No jax."""

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
    """Everything of `Server` but its ports; that of ``metrics_port`` is opened, if it is set.

    What bounds connections (their number, their pace, TLS) is of those who have them.
    """

    def app(self) -> ASGIApp:
        """Return the whole HTTP door as an application: keys, limits and errors are as on a port."""
        return shared(build_app(self._door), self.config.allowed_origins)

    def rpcs(self) -> Mapping[str, grpc.RpcMethodHandler]:
        """Return the handlers of `jaxinfer.v1.Inference`, see `jaxinfer.serve.grpc.server.GrpcServers.handlers`."""
        return self._grpc.handlers()

    async def stats(self) -> EngineStats:
        """Return the engine's figures.

        Raises:
            ServeError: there is none that runs.
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
