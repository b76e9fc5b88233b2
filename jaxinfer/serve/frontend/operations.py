"""Operations of a server: operators change the engine through them, over HTTP and gRPC. No jax."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import pathlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from jaxinfer.engine.core import PauseMode
from jaxinfer.serve.api.admission import require_printable
from jaxinfer.serve.api.errors import Kind, ServeError, invalid, map_exceptions, short
from jaxinfer.serve.api.lora_modules import MAX_PATH_CHARACTERS
from jaxinfer.serve.api.weight_folders import weights_folder
from jaxinfer.serve.core.link import RefusedError
from jaxinfer.serve.core.operations import (
    MODES,
    TAGS,
    AnyOperation,
    Look,
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
    """Weights that are served: their folders (none: those of the start), and their version."""

    folders: tuple[str, ...]
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
        self._committed = _Committed((), 0)
        self._parts: list[str] | None = None  # folders of an update that was started and not finished
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
                folders = [await self._folder(path) for path in (operation.path, *operation.parts)]
                if self._parts is not None:
                    return await self._add(self._parts, operation, folders)
                operation = _with_folders(operation, folders)
            task = asyncio.ensure_future(self._run(operation))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            return await shielded(task)

    def start_update(self) -> None:
        """Begin an update of several folders: those of each `UpdateWeights` from now on, until `finish_update`. A
        started update that was not finished is dropped."""
        self._parts = []

    async def finish_update(self, version: int | None = None, mode: PauseMode | None = None) -> WeightState:
        """Serve the weights of all folders since `start_update` as one version. If that fails, nothing has changed, and
        folders may still be added.

        Raises:
            ServeError: see `run`; INVALID: no update was started, or it has no folder.
        """
        if not self._parts:
            why = "has no folder: POST /update_weights first" if self._parts == [] else "was not started"
            raise ServeError(Kind.INVALID, f"the update of weights {why}", "path")
        parts, self._parts = self._parts, None
        path, *others = parts
        try:
            return await self.run(UpdateWeights(path, version, mode, others))
        except BaseException:
            self._parts = parts if self._parts is None else self._parts
            raise

    async def _add(self, parts: list[str], update: UpdateWeights, folders: list[str]) -> WeightState:
        """Add folders to an update that was started. Returns the state, which has not changed."""
        for name in ("version", "mode"):
            if (value := getattr(update, name)) is not None:
                raise invalid(name, value, "belongs to the end of the update that was started")
        if twice := {*folders} & {*parts}:
            raise invalid("path", min(twice), "is a part of this update already")
        state = await self._run(Look())
        parts += folders
        return state

    async def _run(self, operation: AnyOperation) -> WeightState:
        try:
            state = await self._engine.operate(operation)
        except RefusedError as error:
            raise ServeError(Kind.INVALID, str(error)) from error
        if isinstance(operation, UpdateWeights):
            self._committed = _Committed((operation.path, *operation.parts), state.version)
        elif isinstance(operation, SetVersion):
            self._committed = dataclasses.replace(self._committed, version=state.version)
        return state

    async def restore(self, engine: Operated) -> None:
        """Give an engine that has started the weights that the last one served.

        Raises:
            RequestError, RefusedError: they cannot be served any more.
            EngineDeadError: the engine has ended.
        """
        folders, version = self._committed.folders, self._committed.version
        if folders:
            _log.info("weights %d are read again from %s", version, ", ".join(folders))
            await engine.operate(_with_folders(UpdateWeights("", version, "keep"), folders))
        elif version:
            await engine.operate(SetVersion(version))

    async def _folder(self, path: str) -> str:
        if self._root is None:
            why = f"path={short(path)} is not read: this server was started without weights_root"
            raise ServeError(Kind.PRECONDITION, why, "path")
        require_printable("path", path, 1, MAX_PATH_CHARACTERS)
        return str(await asyncio.to_thread(weights_folder, self._root, path))


def _with_folders(update: UpdateWeights, folders: Sequence[str]) -> UpdateWeights:
    path, *parts = folders
    return msgspec.structs.replace(update, path=path, parts=tuple(parts))


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
