"""Adapters by name, in host memory or in their folders. No jax."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from jaxinfer.config.aliases import advice
from jaxinfer.lora.adapter import Adapter
from jaxinfer.lora.slots import Part
from jaxinfer.sampling_params import RequestError
from jaxinfer.types import LoRARef

_SHOWN = 8  # names in a message


class LoRAError(ValueError):
    """Error for an adapter that cannot be served, with its name and the reason."""


class LoadedLoRA(NamedTuple):
    """An adapter that requests may name.

    Attributes:
        path: path of its folder; "": it was given as arrays.
        identity: hash of its content.
        rank: the largest rank of its modules.
    """

    name: str
    path: str
    identity: str
    rank: int


@dataclasses.dataclass(eq=False)
class _Content:
    """Content of an adapter: its folder, and its arrays if in memory. ``live``: requests that have not ended."""

    loaded: LoadedLoRA
    adapter: Adapter | None
    named: int = 0  # number of names it has
    live: int = 0
    pins: int = 0

    @property
    def needed(self) -> bool:
        """Whether it must stay in memory: it is resident on the device, has no folder, or one that may have changed."""
        return self.pins > 0 or not self.loaded.path or (self.live > 0 and not self.named)


class LoRAStore:
    """Host store of the adapters that requests may name; the least recently used ones are dropped from memory.

    A name refers to the adapter last loaded under it. A replaced adapter is kept, by its identity, until the last
    request that uses it has ended.

    **Threads.** All methods may be called from any thread; one lock guards the tables and is held only for look-ups.
    Files are read, and parts are made, in one thread of the store, in order of submission. `load` blocks until the read
    is done, so it must not be called from an event loop or the engine thread; no other method blocks.

    Args:
        reader: reads a folder, or checks an adapter given as arrays; raises ValueError or OSError on failure.
        parts: splits an adapter into arrays for a device slot, one part per step.
        capacity: adapters in memory; exceeded only while more are resident on the device or were replaced while in use.
    """

    def __init__(
        self, reader: Callable[[str | Adapter], Adapter], parts: Callable[[Adapter], Sequence[Part]], capacity: int
    ) -> None:
        self._reader, self._parts, self._capacity = reader, parts, capacity
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}  # identity by name
        self._contents: dict[str, _Content] = {}  # by identity, least recently used first
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="lora")

    # ---- names

    def load(self, name: str, source: str | Adapter) -> LoRARef:
        """Read a folder, or take an adapter, blocking, so that requests may name it.

        Raises:
            LoRAError: it cannot be read; the name keeps its previous adapter.
        """
        if not name:
            raise LoRAError("lora_name='' must not be empty")
        return self._thread.submit(self._load, name, source).result()

    def _load(self, name: str, source: str | Adapter) -> LoRARef:
        adapter = self._read(name, source)
        loaded = LoadedLoRA(name, source if isinstance(source, str) else "", adapter.identity, adapter.rank)
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
        """Reject further requests for an adapter; requests that already use it finish with it.

        Raises:
            RequestError: no adapter has this name.
        """
        with self._lock:
            self._known(name)
            self._forget_name(name)

    def resolve(self, name: str) -> LoRARef:
        """Return the adapter that a name currently refers to.

        Raises:
            RequestError: the name is unknown; lists the known names.
        """
        with self._lock:
            return LoRARef(name, self._known(name))

    def __len__(self) -> int:
        """Return the number of names that requests may use."""
        return len(self._names)

    def list(self) -> list[LoadedLoRA]:
        """Return the adapters that requests may name, sorted by name."""
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
        """Keep an adapter for a new request until `release`.

        Raises:
            RequestError: the adapter is no longer known.
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
        """Note that an adapter is resident on a device."""
        with self._lock:
            self._contents[identity].pins += 1

    def unpin(self, identity: str) -> None:
        """Note that an adapter was evicted from a device."""
        with self._lock:
            self._contents[identity].pins -= 1
            self._forget_unused(identity)
            self._trim()

    def prepare(self, identity: str) -> Future[Sequence[Part]]:
        """Read and split the adapter of a request that has not ended. The future's exception is a LoRAError with the
        reason."""
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

    def _read(self, name: str, source: str | Adapter) -> Adapter:
        try:
            return self._reader(source)
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
