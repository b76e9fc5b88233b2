"""Follower of process 0 in a multi-process engine: an engine core and its supervisor, no API servers. No jax."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from jaxinfer.serve.core.supervisor import Supervisor
from jaxinfer.serve.runtime.background import Background
from jaxinfer.serve.settings import ServeConfig

_log = logging.getLogger("jaxinfer.serve")


class Follower:
    """The implementation of `jaxinfer serve --process-id 1`, with the lifecycle methods of `Server`.

    A core that ends, alone or with its group, is restarted and retries until process 0 is reachable.

    Args:
        command: command line of a core (default: the real one).
    """

    active = 0

    def __init__(self, config: ServeConfig, command: Sequence[str] | None = None) -> None:
        self.background = Background()
        self._supervisor = Supervisor(config, command)
        self._number = config.process_id

    async def start(self) -> None:
        self._supervisor.subscribe(self._log_state)
        await self._supervisor.start()

    def reload(self) -> None:
        """Do nothing: only process 0 has keys and certificates."""

    async def until_failed(self) -> str:
        """Wait for a failure that no restart fixes; return its message."""
        return await self._supervisor.until_stopped() or "the process was stopped"

    async def drain(self) -> int:
        """Do nothing: only process 0 has requests."""
        return 0

    async def stop(self) -> None:
        """Stop the core, and with it the group."""
        await self._supervisor.stop()

    def _log_state(self, state: str) -> None:
        _log.info("process %d is %s", self._number, state)
