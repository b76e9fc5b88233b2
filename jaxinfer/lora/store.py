"""Adapters by name, in the host's memory or in their folders. No jax."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from jaxinfer.lora.adapter import Adapter
from jaxinfer.lora.slots import Part
from jaxinfer.names import advice
from jaxinfer.sampling_params import RequestError
from jaxinfer.types import LoRARef

_SHOWN = 8  # names in a message


class LoRAError(ValueError):
    """An adapter that cannot be served; says which, and why."""


class LoadedLoRA(NamedTuple):
    """An adapter that requests may name.

    Attributes:
        path: of its folder.
        identity: hash of its content.
        rank: the largest of its modules'.
    """

    name: str
    path: str
    identity: str
    rank: int


@dataclasses.dataclass(eq=False)
class _Content:
    """An adapter's content: where it was read, and in memory or not. ``live``: requests that have not ended."""

    loaded: LoadedLoRA
    adapter: Adapter | None
    named: int = 0  # names that it has
    live: int = 0
    pins: int = 0

    @property
    def needed(self) -> bool:
        """Whether it may not leave the memory: it lies on the device, or its folder may have something else by now."""
        return self.pins > 0 or (self.live > 0 and not self.named)


class LoRAStore:
    """Adapters that requests may name, the least recently used ones left in their folders.

    A name means what was loaded last under it. What it meant before is kept, by its identity, until the last request
    that came with it has ended.

    **Threads.** All methods may be called from any thread; one lock guards the tables and is held for no longer than it
    takes to look something up. Files are read, and parts are made, in one thread of the store's own, in the order in
    which that was asked for. `load` waits for it, and so is not for an event loop or the engine's thread; all other
    methods wait for nothing.

    Args:
        reader: reads a folder; raises ValueError or OSError where it cannot.
        parts: cuts an adapter into what a slot of the device takes, one part a step.
        capacity: adapters in memory; more only while more than that lie on the device or were replaced under requests.
    """

    def __init__(self, reader: Callable[[str], Adapter], parts: Callable[[Adapter], Sequence[Part]], capacity: int):
        self._reader, self._parts, self._capacity = reader, parts, capacity
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}  # to identities
        self._contents: dict[str, _Content] = {}  # by identity, the least recently used first
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="lora")

    # ---- names

    def load(self, name: str, path: str) -> LoRARef:
        """Read a folder, and let requests name it from now on; waits until it is read.

        Raises:
            LoRAError: it cannot be read; what the name meant before stays.
        """
        if not name:
            raise LoRAError("lora_name='' must not be empty")
        return self._thread.submit(self._load, name, path).result()

    def _load(self, name: str, path: str) -> LoRARef:
        adapter = self._read(name, path)
        loaded = LoadedLoRA(name, path, adapter.identity, adapter.rank)
        with self._lock:
            content = self._contents.setdefault(adapter.identity, _Content(loaded, None))
            content.loaded, content.adapter = loaded, adapter
            content.named += 1
            self._touch(adapter.identity)
            self._forget_name(name)
            self._names[name] = adapter.identity
            self._trim()
        return LoRARef(name, adapter.identity)

    def unload(self, name: str) -> None:
        """Let no further request name an adapter; those that came with it end with it.

        Raises:
            RequestError: there is none of this name.
        """
        with self._lock:
            self._known(name)
            self._forget_name(name)

    def resolve(self, name: str) -> LoRARef:
        """What a name means now.

        Raises:
            RequestError: nothing; says what is known.
        """
        with self._lock:
            return LoRARef(name, self._known(name))

    def __len__(self) -> int:
        """Names that requests may give."""
        return len(self._names)

    def list(self) -> list[LoadedLoRA]:
        """Adapters that requests may name, by name."""
        with self._lock:
            return [self._contents[self._names[name]].loaded._replace(name=name) for name in sorted(self._names)]

    def _known(self, name: str) -> str:
        if name not in self._names:
            first, more = sorted(self._names)[:_SHOWN], max(0, len(self._names) - _SHOWN)
            known = f"{', '.join(first) or 'none'}{f' and {more} more' if more else ''}"
            hint = advice(name, self._names)
            raise RequestError("lora", f"={name!r} is no adapter that is loaded{hint and f', {hint}'}: known: {known}")
        return self._names[name]

    def _forget_name(self, name: str) -> None:
        if (identity := self._names.pop(name, None)) is not None:
            self._contents[identity].named -= 1
            self._forget_unused(identity)

    # ---- requests, and the device

    def retain(self, ref: LoRARef) -> None:
        """Keep an adapter for a request that has come with it, until `release`.

        Raises:
            RequestError: it is not known any more.
        """
        with self._lock:
            if ref.identity not in self._contents:
                raise RequestError("lora", f"={ref.name!r} was unloaded or replaced before the request came")
            self._contents[ref.identity].live += 1

    def release(self, ref: LoRARef) -> None:
        """Note that a request has ended."""
        with self._lock:
            self._contents[ref.identity].live -= 1
            self._forget_unused(ref.identity)
            self._trim()

    def pin(self, identity: str) -> None:
        """Note that an adapter is placed on a device."""
        with self._lock:
            self._contents[identity].pins += 1

    def unpin(self, identity: str) -> None:
        """Note that an adapter has left a device."""
        with self._lock:
            self._contents[identity].pins -= 1
            self._forget_unused(identity)
            self._trim()

    def prepare(self, identity: str) -> Future[Sequence[Part]]:
        """The parts of an adapter of a request that has not ended, once they are read and made. The future's exception
        is a LoRAError that says why they cannot be had."""
        return self._thread.submit(self._prepare, identity)

    def _prepare(self, identity: str) -> Sequence[Part]:
        with self._lock:
            if (content := self._contents.get(identity)) is None:
                raise LoRAError(f"adapter {identity} was unloaded")
            adapter, (name, path, *_) = content.adapter, content.loaded
            self._touch(identity)
        if adapter is None:
            adapter = self._read(name, path)
            if adapter.identity != identity:
                raise LoRAError(f"adapter {name!r}: {path} has changed since it was loaded: load it again")
            self._keep(adapter)
        return self._parts(adapter)

    # ---- memory

    def _read(self, name: str, path: str) -> Adapter:
        try:
            return self._reader(path)
        except (ValueError, OSError) as error:
            raise LoRAError(f"adapter {name!r}: {error}") from error

    def _keep(self, adapter: Adapter) -> None:
        with self._lock:
            if (content := self._contents.get(adapter.identity)) is not None:  # else its request has ended meanwhile
                content.adapter = adapter
                self._trim()

    def _touch(self, identity: str) -> None:
        self._contents[identity] = self._contents.pop(identity)

    def _trim(self) -> None:
        held = [each for each in self._contents.values() if each.adapter is not None]
        spare = [each for each in held if not each.needed]
        for content in spare[: max(0, len(held) - self._capacity)]:
            content.adapter = None

    def _forget_unused(self, identity: str) -> None:
        content = self._contents[identity]
        if not (content.named or content.live or content.pins):
            del self._contents[identity]
