"""Counting compilations: after READY there must be none."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax.monitoring

# JAX reports this event around every compilation by the backend, a hit in the persistent cache included.
_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class Compilations:
    """How many programs this process has compiled, and the seconds that took."""

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
