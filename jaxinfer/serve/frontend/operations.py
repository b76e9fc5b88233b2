"""Operations of a server: operators change the engine through them, over HTTP and gRPC. No jax."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import pathlib
from typing import Protocol, runtime_checkable

import msgspec

from jaxinfer.serve.api.admission import require_printable
from jaxinfer.serve.api.errors import Kind, ServeError, invalid, map_exceptions, short
from jaxinfer.serve.api.lora_modules import MAX_PATH_CHARACTERS
from jaxinfer.serve.api.weight_folders import weights_folder
from jaxinfer.serve.core.link import RefusedError
from jaxinfer.serve.core.operations import (
    MODES,
    TAGS,
    AnyOperation,
    Pause,
    SetVersion,
    Sleep,
    UpdateWeights,
    WakeUp,
    WeightState,
)
from jaxinfer.serve.runtime.background import shielded

_MOST_VERSION = 2**63 - 1

_log = logging.getLogger("jaxinfer.serve")


@runtime_checkable
class Operated(Protocol):
    """An engine that operators change; see `jaxinfer.serve.core.link.CoreLink.operate`."""

    async def operate(self, operation: AnyOperation) -> WeightState: ...


@dataclasses.dataclass(frozen=True)
class _Committed:
    """Weights that are served: their folder (None: those of the start), and their version."""

    folder: str | None
    version: int


class Operations:
    """Changes of the engine; remembers the weights that are served, for the next engine after a restart.

    It must be used from one event loop.

    Args:
        engine: the engine that currently runs.
        root: folder below which weights may be read; None: `UpdateWeights` is rejected.
    """

    def __init__(self, engine: Operated, root: pathlib.Path | None = None) -> None:
        self._engine, self._root = engine, root
        self._committed = _Committed(None, 0)
        self._running: set[asyncio.Task[WeightState]] = set()

    async def run(self, operation: AnyOperation) -> WeightState:
        """Run an operation, to its end even if the caller is cancelled meanwhile.

        Raises:
            ServeError: INVALID: a value is wrong, or the state of the engine does not allow it. PRECONDITION: weights
                are not read, because no root is set. UNAVAILABLE: the engine does not run.
        """
        with map_exceptions():
            _check(operation)
            if isinstance(operation, UpdateWeights):
                operation = msgspec.structs.replace(operation, path=await self._folder(operation.path))
            task = asyncio.ensure_future(self._run(operation))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            return await shielded(task)

    async def _run(self, operation: AnyOperation) -> WeightState:
        try:
            state = await self._engine.operate(operation)
        except RefusedError as error:
            raise ServeError(Kind.INVALID, str(error)) from error
        if isinstance(operation, UpdateWeights):
            self._committed = _Committed(operation.path, state.version)
        elif isinstance(operation, SetVersion):
            self._committed = dataclasses.replace(self._committed, version=state.version)
        return state

    async def restore(self, engine: Operated) -> None:
        """Give an engine that has started the weights that the last one served.

        Raises:
            RequestError, RefusedError: they cannot be served any more.
            EngineDeadError: the engine has ended.
        """
        folder, version = self._committed.folder, self._committed.version
        if folder is not None:
            _log.info("weights %d are read again from %s", version, folder)
            await engine.operate(UpdateWeights(folder, version, "keep"))
        elif version:
            await engine.operate(SetVersion(version))

    async def _folder(self, path: str) -> str:
        if self._root is None:
            why = f"path={short(path)} is not read: this server was started without weights_root"
            raise ServeError(Kind.PRECONDITION, why, "path")
        require_printable("path", path, 1, MAX_PATH_CHARACTERS)
        return str(await asyncio.to_thread(weights_folder, self._root, path))


def _check(operation: AnyOperation) -> None:
    """Raise ServeError INVALID for a value that no engine takes."""
    match operation:
        case Pause(mode) | Sleep(mode=mode) | UpdateWeights(mode=mode) if mode is not None and mode not in MODES:
            raise invalid("mode", mode, f"must be one of {', '.join(MODES)}")
    match operation:
        case Sleep(tags=tags) | WakeUp(tags) if any(tag not in TAGS for tag in tags):
            raise invalid("tags", list(tags), f"must be some of {', '.join(TAGS)}")
        case Sleep(level=level) if level not in (1, 2):
            raise invalid("level", level, "must be 1 or 2")
        case UpdateWeights(version=version) | SetVersion(version):
            if version is not None and not 0 < version <= _MOST_VERSION:
                raise invalid("version", version, f"must be from 1 to {_MOST_VERSION}")


def required(operations: Operations | None) -> Operations:
    """Return the operations. Raises `ServeError` PRECONDITION if the engine cannot be changed."""
    if operations is None:
        raise ServeError(Kind.PRECONDITION, "the engine of this server cannot be changed")
    return operations
