"""The garbage collector of a process that serves. No jax."""

from __future__ import annotations

import gc

_THRESHOLDS = (10_000, 20, 50)
"""Container objects between two collections of the youngest; of these, and again, between those of the older ones."""


def settle() -> None:
    """What there is now stays until the process ends: no collection looks at it again.

    Modules and descriptors are some hundred thousand objects, and a collection of all of them stops every stream for
    70 to 90 ms. What a token makes is freed without the collector, so it need not look often either. Once a process,
    by whoever owns it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
