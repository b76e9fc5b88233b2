"""Completion tracking for a group's calls: one thread waits for their results, so that no other thread has to."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


class Ledger:
    """Counts of the calls that returned in this process, and of those ``done``: their results are on its devices.

    Args:
        answer: callback for the results that process 0 waits for, on the host.
        failed: callback for the error message.
    """

    def __init__(self, answer: Callable[[list[np.ndarray]], None], failed: Callable[[str], None]) -> None:
        self.called, self.done, self._answer, self._failed = 0, 0, answer, failed
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="jaxinfer-ledger", daemon=True).start()

    def launched(self, results: Any, wanted: bool = False) -> None:
        """Record that the next call was launched. ``results``: a tree of arrays that are never donated, or None if a
        later call completes after it; ``wanted``: process 0 waits for them."""
        self.called += 1
        self._calls.put((results, wanted))

    def _run(self) -> None:
        while True:
            results, wanted = self._calls.get()
            try:
                jax.block_until_ready(results)
                if wanted:
                    self._answer([np.asarray(leaf) for leaf in jax.tree.leaves(results)])
            except RuntimeError as error:  # JAX's own errors are RuntimeErrors
                self._failed(f"a program failed: {error}")
                return
            del results
            self.done += 1
