"""The memory of a process that serves. No jax."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import mmap
import pathlib
from collections.abc import Callable

_THRESHOLDS = (10_000, 20, 50)
"""Container objects between two collections of the youngest; of these, and again, between those of the older ones."""

_LOOK_SECONDS = 0.25
_FEW = 1000  # container objects, whose collection is not worth it
_LITTLE = 8 << 20  # bytes, likewise


def settle() -> None:
    """Freeze all objects that there are until the process ends: no collection looks at them again.

    Modules and descriptors are some hundred thousand objects, and a collection of all of them stops every stream for
    70 to 90 ms. What a token makes is freed without the collector, so it need not look often either. Once a process,
    by whoever owns it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


async def tidy(active: Callable[[], int]) -> None:
    """Give back what requests left, soon after the last one has ended; until cancelled.

    Streams that end by an error are in cycles with it, and so are their buffers: `settle` leaves these for long. When
    nothing runs, looking at everything disturbs nobody.

    Args:
        active: how many requests there are.
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
    """Bytes of memory that the process has now; 0 on a system that does not say so."""
    try:
        pages = pathlib.Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * mmap.PAGESIZE


def trim() -> None:
    """Give back to the system what is free.

    glibc keeps what was freed below something that is in use; others have no such call, nor the need.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
