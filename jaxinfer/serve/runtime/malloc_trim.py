"""Garbage collection and heap trimming of a server process. No jax."""

from __future__ import annotations

import asyncio
import gc
import mmap
import pathlib
from collections.abc import Callable

from jaxinfer.helper_process import trim

_THRESHOLDS = (10_000, 20, 50)
"""GC thresholds: container objects per collection of generation 0, then collections per collection of the next."""

_LOOK_SECONDS = 0.25
_FEW = 1000  # container objects that are not worth a collection
_LITTLE = 8 << 20  # bytes of growth that are not worth a collection


def settle() -> None:
    """Freeze all existing objects until the process ends: the garbage collector skips them from now on.

    Modules and descriptors are some hundred thousand objects, and collecting them stops every stream for 70 to 90 ms.
    The objects of a token are freed by reference counting, so collections may be rare. To be called once per process,
    by its owner.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


async def tidy(active: Callable[[], int]) -> None:
    """Free the memory of ended requests when the server becomes idle; runs until cancelled.

    Streams that end by an error form reference cycles with it and with their buffers, which the thresholds of `settle`
    keep for long. A full collection delays no request while the server is idle.

    Args:
        active: returns the number of active requests.
    """
    quiet, before = False, resident()
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        if active():
            quiet = False
        elif not quiet:
            quiet = True
        elif _has_grown() or resident() > before + _LITTLE:  # a few large messages are few objects
            gc.collect()
            await asyncio.to_thread(trim)
            before = resident()


def _has_grown() -> bool:
    young, *older = gc.get_count()
    return young > _FEW or any(older)


def resident() -> int:
    """Return the resident memory of the process in bytes; 0 on a system that does not report it."""
    try:
        pages = pathlib.Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * mmap.PAGESIZE
