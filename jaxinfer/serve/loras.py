"""The adapters that requests at a server may name. No jax."""

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
from jaxinfer.serve.admission import require_printable
from jaxinfer.serve.backend import LoRABackend
from jaxinfer.serve.calls import Call
from jaxinfer.serve.errors import Kind, ServeError, UnknownModelError, invalid, short
from jaxinfer.serve.faults import answered
from jaxinfer.serve.lora_modules import MAX_NAME_CHARACTERS, MAX_PATH_CHARACTERS, parse_modules
from jaxinfer.serve.streams import EngineDeadError
from jaxinfer.types import LoRARef

_SHOWN = 8  # names in a message

_log = logging.getLogger("jaxinfer.serve")


class NameInUseError(ServeError):
    """An adapter of this name is loaded: to HTTP's clients a wrong value, as vLLM tells them."""


class LoRAs:
    """What the names of adapters mean now, over engines that may die and be started again.

    Belongs to one event loop. A request takes what its name means when it comes (`resolve`), and `holding` that until
    the engine has accepted it; so neither `load` nor `unload` changes a request that waits.

    Args:
        backend: whichever engine runs.
        modules: those that `restore` loads first, as in `parse_modules`.
        root: the folder below which `load` may read; None: it is refused.
    """

    def __init__(self, backend: LoRABackend, modules: Sequence[str] = (), root: pathlib.Path | None = None) -> None:
        self._backend, self._modules, self._root = backend, modules, root
        self._base = ""
        self._names: dict[str, LoadedLoRA] = {}
        self._lost: set[str] = set()  # names that a restart has not brought back
        self._begun = False
        self._changing = asyncio.Lock()
        self._held = collections.Counter[str]()  # requests that the engine has not accepted yet, by identity
        self._leaving: list[LoRARef] = []  # nobody can name them any more, but somebody has
        self._loading: set[asyncio.Task[LoadedLoRA]] = set()

    # ---- names

    def list(self) -> list[LoadedLoRA]:
        """The adapters that requests may name, by name."""
        return [self._names[name] for name in sorted(self._names)]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def resolve(self, name: str) -> LoRARef:
        """What a name means now.

        Raises:
            ServeError: NOT_FOUND: nothing; says what is known.
        """
        if (loaded := self._names.get(name)) is not None:
            return _ref(loaded)
        with answered():
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
        """Keep an adapter, whatever its name means meanwhile, for a request that the engine does not have yet."""
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
            replace: if the name is in use, let it mean the new content from now on.

        Raises:
            ServeError: INVALID: the name cannot be an adapter's, the folder is not to be read, or what is in it cannot
                be served. PRECONDITION: there is no root. UNAVAILABLE: the engine does not run. What the name meant
                before stays.
            NameInUseError: the name is in use, and ``replace`` is false.
        """
        with answered():
            self.check_name(name)
            require_printable("lora_path", path, 1, MAX_PATH_CHARACTERS)
            task = asyncio.ensure_future(self._load(name, await self._folder(path), replace))
            self._loading.add(task)
            task.add_done_callback(self._loading.discard)
            return await asyncio.shield(task)

    def check_name(self, name: str) -> None:
        """Raises `RequestError` or `ServeError` INVALID for what can be no adapter's name."""
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
        """Let no further request name an adapter; those that came with it end with it.

        Raises:
            ServeError: NOT_FOUND: there is none of this name.
        """
        async with self._changing:
            if name not in self._names and name not in self._lost:
                with answered():
                    raise UnknownModelError("lora_name", f"={reprlib.repr(name)} {self._why_not(name)}")
            self._lost.discard(name)
            if (loaded := self._names.pop(name, None)) is not None:
                with contextlib.suppress(EngineDeadError):  # the next one is not told of it
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

    # ---- an engine's start

    async def restore(self, backend: LoRABackend, base: str, get_on: Callable[[], None] = lambda: None) -> None:
        """Load into an engine that has started what requests may name. A folder whose content has changed since means
        the new one; one that cannot be read any more is dropped. Both are logged.

        Args:
            base: the name of the model itself.
            get_on: called after each adapter.

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
    """The call with the adapter that its model's name means now, which is kept until this ends.

    Args:
        base: the name of the model itself.

    Raises:
        ServeError: NOT_FOUND: it means nothing here.
    """
    if call.lora is not None or call.model in (None, base):
        yield call
        return
    if loras is None:
        with answered():
            raise UnknownModelError("model", f"={reprlib.repr(call.model)} is not served here, only {base!r}")
    ref = loras.resolve(str(call.model))
    with loras.holding(ref):
        yield dataclasses.replace(call, lora=ref)


def required(loras: LoRAs | None) -> LoRAs:
    """Raises `ServeError` PRECONDITION: the engine serves no adapters."""
    if loras is None:
        raise ServeError(Kind.PRECONDITION, "this server serves no adapters: it was started without enable_lora")
    return loras


def _ref(loaded: LoadedLoRA) -> LoRARef:
    return LoRARef(loaded.name, loaded.identity)
