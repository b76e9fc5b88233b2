"""Backend that forwards to the engine core that currently runs. No jax."""

from __future__ import annotations

from collections.abc import Callable

from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.lora.store import LoadedLoRA
from jaxinfer.serve.core.backend import BackendStream
from jaxinfer.serve.core.link import CoreLink
from jaxinfer.types import LoRARef, Request


class CurrentCore:
    """A `Backend` and `LoRABackend` that forwards to the current core."""

    def __init__(self, link: Callable[[], CoreLink]) -> None:
        self._link = link

    async def submit(self, request: Request) -> BackendStream:
        return await self._link().submit(request)

    async def abort(self, request_id: str, index: int | None = None) -> None:
        await self._link().abort(request_id, index)

    async def stats(self) -> EngineStats:
        return await self._link().stats()

    async def reset_prefix_cache(self) -> int:
        return await self._link().reset_prefix_cache()

    async def load_lora(self, name: str, path: str) -> LoadedLoRA:
        return await self._link().load_lora(name, path)

    def unload_lora(self, name: str) -> None:
        self._link().unload_lora(name)

    def release_lora(self, ref: LoRARef) -> None:
        self._link().release_lora(ref)
