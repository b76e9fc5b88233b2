"""Registry of the LoRA adapters that requests may name. No jax."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import os
import pathlib
import reprlib
from collections.abc import Callable, Iterator, Sequence

from jaxinfer.lora.errors import AdapterError
from jaxinfer.lora.folders import adapter_folder
from jaxinfer.lora.store import LoadedLoRA, LoRAError
from jaxinfer.serve.api.admission import require_printable
from jaxinfer.serve.api.errors import Kind, ServeError, UnknownModelError, invalid, map_exceptions, short
from jaxinfer.serve.api.lora_modules import MAX_NAME_CHARACTERS, MAX_PATH_CHARACTERS, parse_modules
from jaxinfer.serve.api.requests import Call
from jaxinfer.serve.api.streams import EngineDeadError
from jaxinfer.serve.core.backend import LoRABackend
from jaxinfer.serve.runtime.background import shielded
from jaxinfer.types import LoRARef

_SHOWN = 8  # adapter names in a message

_log = logging.getLogger("jaxinfer.serve")


class NameInUseError(ServeError):
    """Error for an adapter name that is already loaded: INVALID for HTTP clients, as in vLLM."""


class LoRAs:
    """The registry of adapter names, which is kept when the engine dies and is restarted.

    It must be used from one event loop. A request resolves its adapter name on arrival (`resolve`), and keeps the
    adapter (`holding`) until the engine has accepted it, so neither `load` nor `unload` affects a waiting request.

    Args:
        backend: the engine that currently runs.
        modules: adapters that `restore` loads first, as in `parse_modules`.
        root: folder below which `load` may read; None: `load` is rejected.
    """

    def __init__(self, backend: LoRABackend, modules: Sequence[str] = (), root: pathlib.Path | None = None) -> None:
        self._backend, self._modules, self._root = backend, modules, root
        self._base = ""
        self._names: dict[str, LoadedLoRA] = {}
        self._lost: set[str] = set()  # names that could not be loaded again after a restart
        self._begun = False
        self._changing = asyncio.Lock()
        self._held = collections.Counter[str]()  # requests that the engine has not accepted yet, by adapter identity
        self._leaving: list[LoRARef] = []  # adapters without a name, possibly held by requests
        self._loading: set[asyncio.Task[LoadedLoRA]] = set()

    # ---- names

    def list(self) -> list[LoadedLoRA]:
        """List the adapters that requests may name, by name."""
        return [self._names[name] for name in sorted(self._names)]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def resolve(self, name: str) -> LoRARef:
        """Return the adapter that a name currently refers to.

        Raises:
            ServeError: NOT_FOUND: the name is unknown; the message lists the known names.
        """
        if (loaded := self._names.get(name)) is not None:
            return _ref(loaded)
        with map_exceptions():
            raise UnknownModelError("model", f"={reprlib.repr(name)} {self._why_not(name)}")

    def _why_not(self, name: str) -> str:
        if name in self._lost:
            return "could not be loaded again when the engine was restarted: the server's log says why"
        known = sorted(self._names)
        more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
        adapters = f"the adapters {', '.join(map(repr, known[:_SHOWN]))}{more}" if known else "no adapters"
        return f"is not served here, only {self._base!r} and {adapters}"

    @contextlib.contextmanager
    def holding(self, ref: LoRARef) -> Iterator[None]:
        """Keep an adapter for a request that the engine has not accepted yet, even if its name changes meanwhile."""
        self._held[ref.identity] += 1
        try:
            yield
        finally:
            self._held[ref.identity] -= 1
            if not self._held[ref.identity]:
                del self._held[ref.identity]
                self._release_what_left()

    # ---- changes

    async def load(self, name: str, path: str, *, replace: bool = True) -> LoadedLoRA:
        """Load an adapter from below the root. It is loaded even if the caller is cancelled meanwhile.

        Args:
            replace: whether a name in use may be given to the new adapter.

        Raises:
            ServeError: INVALID: the name is not allowed, the folder may not be read, or the adapter cannot be served.
                PRECONDITION: no root is set. UNAVAILABLE: the engine does not run. The name's adapter stays.
            NameInUseError: the name is in use, and ``replace`` is false.
        """
        with map_exceptions():
            self.check_name(name)
            require_printable("lora_path", path, 1, MAX_PATH_CHARACTERS)
            task = asyncio.ensure_future(self._load(name, await self._folder(path), replace))
            self._loading.add(task)
            task.add_done_callback(self._loading.discard)
            return await shielded(task)

    def check_name(self, name: str) -> None:
        """Raise `RequestError` or `ServeError` INVALID for an invalid adapter name."""
        require_printable("lora_name", name, 1, MAX_NAME_CHARACTERS)
        if name == self._base:
            raise invalid("lora_name", name, "is the name of the model itself")

    async def _folder(self, path: str) -> str:
        if self._root is None:
            why = f"lora_path={short(path)} is not read: this server was started without lora_root"
            raise ServeError(Kind.PRECONDITION, why, "lora_path")
        try:
            return str(await asyncio.to_thread(adapter_folder, self._root, path))
        except AdapterError as error:
            raise ServeError(Kind.INVALID, str(error), "lora_path") from error

    async def _load(self, name: str, folder: str, replace: bool) -> LoadedLoRA:
        async with self._changing:
            if name in self._names and not replace:
                why = f"lora_name={short(name)} has already been loaded: set load_inplace to true to replace it"
                raise NameInUseError(Kind.INVALID, why, "lora_name")
            try:
                loaded = await self._backend.load_lora(name, folder)
            except LoRAError as error:
                raise ServeError(Kind.INVALID, f"lora_path={short(folder)}: {error}", "lora_path") from error
            self._enter(loaded)
        _log.info("adapter %r: loaded from %s, rank %d, content %s", *loaded[:2], loaded.rank, loaded.identity[:12])
        return loaded

    def _enter(self, loaded: LoadedLoRA) -> None:
        before = self._names.get(loaded.name)
        self._names[loaded.name] = loaded
        self._lost.discard(loaded.name)
        if before is not None:
            self._leave(_ref(before))

    async def unload(self, name: str) -> None:
        """Unload an adapter: no further request may name it, and its running requests finish.

        Raises:
            ServeError: NOT_FOUND: no adapter has this name.
        """
        async with self._changing:
            if name not in self._names and name not in self._lost:
                with map_exceptions():
                    raise UnknownModelError("lora_name", f"={reprlib.repr(name)} {self._why_not(name)}")
            self._lost.discard(name)
            if (loaded := self._names.pop(name, None)) is not None:
                with contextlib.suppress(EngineDeadError):  # a restarted engine does not load it
                    self._backend.unload_lora(name)
                self._leave(_ref(loaded))
        _log.info("adapter %r: unloaded", name)

    def _leave(self, ref: LoRARef) -> None:
        self._leaving.append(ref)
        self._release_what_left()

    def _release_what_left(self) -> None:
        free = [ref for ref in self._leaving if ref.identity not in self._held]
        self._leaving = [ref for ref in self._leaving if ref.identity in self._held]
        with contextlib.suppress(EngineDeadError):
            for ref in free:
                self._backend.release_lora(ref)

    # ---- engine start

    async def restore(self, backend: LoRABackend, base: str, get_on: Callable[[], None] = lambda: None) -> None:
        """Load the named adapters into an engine that has started. If a folder has changed since, its name refers to
        the new content; an adapter that cannot be read any more is dropped. Both are logged.

        Args:
            base: name of the base model.
            get_on: called after each adapter, to report progress.

        Raises:
            LoRAError: the first engine cannot load one of ``modules``.
            EngineDeadError: the engine has ended.
        """
        async with self._changing:
            self._base, self._leaving = base, []
            if not self._begun:
                await self._load_modules(backend, get_on)
                return
            for loaded in self.list():
                await self._load_again(backend, loaded)
                get_on()

    async def _load_modules(self, backend: LoRABackend, get_on: Callable[[], None]) -> None:
        try:
            modules = parse_modules(self._modules, self._base)
        except ValueError as error:
            raise LoRAError(f"lora_modules: {error}") from error
        for name, path in modules.items():
            self._names[name] = await backend.load_lora(name, os.path.abspath(path))
            get_on()
        self._begun = True

    async def _load_again(self, backend: LoRABackend, before: LoadedLoRA) -> None:
        try:
            loaded = await backend.load_lora(before.name, before.path)
        except LoRAError as error:
            _log.error("%s: it was loaded before the engine was restarted, and cannot be named any more", error)
            del self._names[before.name]
            self._lost.add(before.name)
            return
        self._names[before.name] = loaded
        if loaded.identity != before.identity:
            _log.warning("adapter %r: %s has changed since it was loaded: it means the new content", *loaded[:2])


@contextlib.contextmanager
def meant(call: Call, base: str, loras: LoRAs | None) -> Iterator[Call]:
    """Yield the call with the adapter that its model name refers to, which is kept until the block ends.

    Args:
        base: name of the base model.

    Raises:
        ServeError: NOT_FOUND: the name is unknown.
    """
    if call.lora is not None or call.model in (None, base):
        yield call
        return
    if loras is None:
        with map_exceptions():
            raise UnknownModelError("model", f"={reprlib.repr(call.model)} is not served here, only {base!r}")
    ref = loras.resolve(str(call.model))
    with loras.holding(ref):
        yield dataclasses.replace(call, lora=ref)


def required(loras: LoRAs | None) -> LoRAs:
    """Return the registry. Raises `ServeError` PRECONDITION if the engine serves no adapters."""
    if loras is None:
        raise ServeError(Kind.PRECONDITION, "this server serves no adapters: it was started without enable_lora")
    return loras


def _ref(loaded: LoadedLoRA) -> LoRARef:
    return LoRARef(loaded.name, loaded.identity)
