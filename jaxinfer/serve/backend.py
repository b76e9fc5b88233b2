"""The engine as the front end sees it, wherever it runs. No jax.

`jaxinfer.serve.async_engine.AsyncEngine` is one in this process; `jaxinfer.serve.core.link.CoreLink` is the face of
one in another.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol, Self, runtime_checkable

from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.lora.store import LoadedLoRA
from jaxinfer.types import LoRARef, Request, SequenceDelta


@runtime_checkable
class BackendStream(Protocol):
    """The deltas of one accepted request. Leaving its ``async with`` early aborts the request."""

    @property
    def request(self) -> Request:
        """The request with its seed resolved."""
        ...

    def __aiter__(self) -> AsyncIterator[SequenceDelta]:
        """Deltas. Those that a slow reader has not fetched are merged, one for each output: nothing is lost."""
        ...

    @property
    def idle(self) -> bool:
        """The next delta must be waited for."""
        ...

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever something comes that no reader waits for, be it the end."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exception: object) -> None: ...

    async def aclose(self) -> None: ...


@runtime_checkable
class Backend(Protocol):
    """An engine that serves many clients."""

    async def submit(self, request: Request) -> BackendStream:
        """Raises `RequestError` or `QueueFullError` if it is refused, `EngineDeadError` if the engine does not run.
        The stream raises `EngineDeadError` if it ends by a fault."""
        ...

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its outputs; its stream gets a last delta with `FinishReason.ABORT`."""
        ...

    async def stats(self) -> EngineStats: ...

    async def reset_prefix_cache(self) -> int:
        """Forget every cached page, on the device and on the host; how many those were. Requests that run keep theirs,
        which no other request will find. Raises `EngineDeadError` if the engine does not run."""
        ...


@runtime_checkable
class LoRABackend(Protocol):
    """An engine that serves adapters. All methods raise `EngineDeadError` where it does not run."""

    async def load_lora(self, name: str, path: str) -> LoadedLoRA:
        """Let requests come with what a folder holds, until it is released. Raises `LoRAError` if it cannot be read."""
        ...

    def unload_lora(self, name: str) -> None:
        """Drop a name. It does not wait."""
        ...

    def release_lora(self, ref: LoRARef) -> None:
        """Take back one loading: no further request will come with it. It does not wait."""
        ...
