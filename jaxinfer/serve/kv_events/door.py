"""KV events of a server: configured by its settings, fed by its supervisor. No jax."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from jaxinfer.serve.api.kv_events import OFF, KvEventsConfig
from jaxinfer.serve.core.messages import KvEvents
from jaxinfer.serve.kv_events.hub import Hub
from jaxinfer.serve.runtime.background import Background

try:
    from jaxinfer.serve.kv_events.publisher import Publisher
except ImportError:  # the extra `routing` is not installed: settings that need it are rejected
    Publisher = None  # type: ignore[assignment, misc]

BEGUN = ("ready", "dead")
"""Engine states that invalidate all earlier events."""

_log = logging.getLogger("jaxinfer.serve.kv_events")


class KvEventsEndpoint:
    """The KV events of a server, for all subscribers.

    Args:
        ranks: number of engine replicas.
        model: returns the served model name; called when a message is sent.

    Attributes:
        hub: event hub; None if KV events are disabled.
    """

    def __init__(self, config: KvEventsConfig, ranks: int, model: Callable[[], str]) -> None:
        self._config, self._model = config, model
        self.hub = Hub(ranks) if config.kv_events else None
        self._publisher: Publisher | None = None

    @property
    def endpoint(self) -> str | None:
        """Endpoint of the publisher."""
        return None if self._publisher is None else self._publisher.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        return None if self._publisher is None else self._publisher.replay_endpoint

    def take(self, events: KvEvents) -> None:
        """Pass the engine's events to the hub."""
        if self.hub is not None:
            self.hub.take(events)

    def changed(self, state: str) -> None:
        """Handle a new engine state, see `Supervisor`."""
        if self.hub is not None and state in BEGUN:
            self.hub.begin()

    def start(self, background: Background) -> None:
        """Open the endpoints.

        Raises:
            ServeConfigError: an address is not available.
        """
        config = self._config
        if self.hub is None or {config.kv_events_endpoint, config.kv_events_replay_endpoint or OFF} == {OFF}:
            return
        self._publisher = Publisher(config, self.hub, self._topic, background)
        told = ", what was missed at " + self._publisher.replay_endpoint if self._publisher.replay_endpoint else ""
        _log.info("KV events are told at %s%s", self._publisher.endpoint or "no address of their own", told)

    def _topic(self) -> str:
        return self._config.kv_events_topic or f"kv@{socket.gethostname()}@{self._model()}"

    async def stop(self) -> None:
        if self._publisher is not None:
            await self._publisher.stop()
