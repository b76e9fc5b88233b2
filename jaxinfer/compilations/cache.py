"""JAX's persistent compilation cache: its location, its use by this process, and timing of start phases."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import time
import weakref
from collections.abc import Iterator

import jax
import jax.monitoring

_log = logging.getLogger("jaxinfer.start")

DEFAULT_FOLDER = pathlib.Path("~/.cache/jaxinfer/compiled")

# JAX reports this event around every compilation by the backend, a hit in the persistent cache included.
_EVENT = "/jax/core/compile/backend_compile_duration"
_FOUND = "/jax/compilation_cache/cache_hits"
_KEPT = "/jax/compilation_cache/cache_misses"  # when the cache stores a compiled program


def use_compilation_cache(folder: str | None) -> None:
    """Keep compiled programs in ``folder`` (None: the user's cache folder; "": no cache), so that a second start
    compiles nothing that the first one did.

    JAX has one cache per process: the last call decides.
    """
    path = None if folder == "" else str(pathlib.Path(folder or DEFAULT_FOLDER).expanduser())
    jax.config.update("jax_compilation_cache_dir", path)
    # Every program of the engine counts, however small: startup time is their sum.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Log the duration of a start phase at debug level."""
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
    """Count every compilation in this process, regardless of its caller, until the block ends."""
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


def compilations_during(owner: object) -> Compilations:
    """Count every compilation in this process as long as ``owner`` is referenced."""
    block = contextlib.ExitStack()
    seen = block.enter_context(count_compilations())
    weakref.finalize(owner, block.close)
    return seen


@dataclasses.dataclass
class CacheUse:
    """Use of the persistent cache by this process: ``wanted`` compilations or cache hits; of these the hits ``found``
    in the cache, and compiled programs ``kept`` there."""

    wanted: int = 0
    found: int = 0
    kept: int = 0

    @property
    def compiled(self) -> int:
        return self.wanted - self.found


@contextlib.contextmanager
def count_cache_use() -> Iterator[CacheUse]:
    """Count the use of the persistent cache by this process, until the block ends."""
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
