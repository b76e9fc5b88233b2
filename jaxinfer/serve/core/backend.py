"""Engine interfaces of the front end. No jax.

`jaxinfer.serve.core.async_engine.AsyncEngine` runs an engine in this process; `jaxinfer.serve.core.link.CoreLink`
connects to an engine core in another process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol, Self, runtime_checkable

from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.lora.store import LoadedLoRA
from jaxinfer.types import LoRARef, Request, SequenceDelta


@runtime_checkable
class BackendStream(Protocol):
    """The delta stream of one accepted request. Leaving its ``async with`` early aborts the request."""

    @property
    def request(self) -> Request:
        """The request with its seed resolved."""
        ...

    def __aiter__(self) -> AsyncIterator[SequenceDelta]:
        """Iterate over deltas. Deltas that are not fetched yet are merged, one per output; no token is lost."""
        ...

    @property
    def idle(self) -> bool:
        """Whether the next delta is not available yet."""
        ...

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` on each delta, or the end of the stream, that arrives while no reader waits."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exception: object) -> None: ...

    async def aclose(self) -> None: ...


@runtime_checkable
class Backend(Protocol):
    """An engine that serves many clients."""

    async def submit(self, request: Request) -> BackendStream:
        """Submit a request. Raises `RequestError` or `QueueFullError` if it is rejected, `EngineDeadError` if the
        engine does not run. The stream raises `EngineDeadError` if it ends by a fault."""
        ...

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """Abort a request or one of its outputs; its stream gets a last delta with `FinishReason.ABORT`."""
        ...

    async def stats(self) -> EngineStats: ...

    async def reset_prefix_cache(self) -> int:
        """Evict all cached pages from device and host memory and return their number. Running requests keep their
        pages, which no other request can match any more. Raises `EngineDeadError` if the engine does not run."""
        ...


@runtime_checkable
class LoRABackend(Protocol):
    """An engine that serves LoRA adapters. All methods raise `EngineDeadError` if the engine does not run."""

    async def load_lora(self, name: str, path: str) -> LoadedLoRA:
        """Load an adapter from a folder, for requests until it is released. Raises `LoRAError` if it cannot be read."""
        ...

    def unload_lora(self, name: str) -> None:
        """Drop a name without waiting."""
        ...

    def release_lora(self, ref: LoRARef) -> None:
        """Release one load of an adapter, which no further request will use, without waiting."""
        ...
