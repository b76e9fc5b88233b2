"""JAX's cache of executables: where it is, what it does for this process, and how long parts of a start take."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import time
from collections.abc import Iterator

import jax
import jax.monitoring

_log = logging.getLogger("jaxinfer.start")

DEFAULT_FOLDER = pathlib.Path("~/.cache/jaxinfer/compiled")

# JAX reports this event around every compilation by the backend, a hit in the persistent cache included.
_EVENT = "/jax/core/compile/backend_compile_duration"
_FOUND = "/jax/compilation_cache/cache_hits"
_KEPT = "/jax/compilation_cache/cache_misses"  # where the cache has taken what was compiled


def use_compilation_cache(folder: str | None) -> None:
    """Keep compiled programs in ``folder`` (None: the user's cache folder; "": nowhere): the second start compiles
    nothing that the first one did.

    JAX has one cache per process: the last call decides.
    """
    path = None if folder == "" else str(pathlib.Path(folder or DEFAULT_FOLDER).expanduser())
    jax.config.update("jax_compilation_cache_dir", path)
    # Every program of the engine counts, however small: startup is their sum.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Tell, for debugging, how long a part of a start takes."""
    begun = time.perf_counter()
    try:
        yield
    finally:
        _log.debug("%s: %.2f s", what, time.perf_counter() - begun)


@dataclasses.dataclass
class Compilations:
    """Number of programs that this process has compiled, and the seconds that took."""

    count: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Counts every compilation in this process, whoever causes it, until the block ends."""
    seen = Compilations()

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == _EVENT:
            seen.count += 1
            seen.seconds += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@dataclasses.dataclass
class CacheUse:
    """The persistent cache in this process: compilations ``wanted`` by the backend or in their place; of them those
    ``found`` in the cache, and those that were compiled and ``kept`` there."""

    wanted: int = 0
    found: int = 0
    kept: int = 0

    @property
    def compiled(self) -> int:
        return self.wanted - self.found


@contextlib.contextmanager
def count_cache_use() -> Iterator[CacheUse]:
    """Counts what the persistent cache does for this process, until the block ends."""
    use = CacheUse()

    def listen(event: str, **_: str | int) -> None:
        use.found += event == _FOUND
        use.kept += event == _KEPT

    jax.monitoring.register_event_listener(listen)
    try:
        with count_compilations() as seen:
            yield use
    finally:
        jax.monitoring.unregister_event_listener(listen)
        use.wanted = seen.count
