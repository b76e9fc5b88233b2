"""A process that follows process 0 of its group: an engine core and who watches over it, and no doors. No jax."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from jaxinfer.serve.background import Background
from jaxinfer.serve.core.supervisor import Supervisor
from jaxinfer.serve.settings import ServeConfig

_log = logging.getLogger("jaxinfer.serve")


class Follower:
    """Everything behind `jaxinfer serve --process-id 1`, with the methods of `Server` that its life needs.

    A core that ends, with its group or alone, is started again, and looks for process 0 until that is there.

    Args:
        command: that starts a core (default: the real one).
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
        """Do nothing: keys and certificates are process 0's."""

    async def until_failed(self) -> str:
        """Wait for what no restart mends; the sentence that says so."""
        return await self._supervisor.until_stopped() or "the process was stopped"

    async def drain(self) -> int:
        """End nothing: requests are process 0's."""
        return 0

    async def stop(self) -> None:
        """End the core, and with it the group."""
        await self._supervisor.stop()

    def _log_state(self, state: str) -> None:
        _log.info("process %d is %s", self._number, state)
