"""Records that a section writes while it runs, one JSON line each, and marks of the start and end of its steps.

A killed section loses only the running step (`pallas_kernels.supervise`): the section is restarted, and skips the steps
that have ended, or in which an earlier process hung or died.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pallas_kernels.supervise import Journal

# Exceptions of JAX where a program does not compile or run (its own errors are RuntimeErrors), our rejections, and
# exceptions of a missing or incompatible op, kernel or peer.
FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    OSError,
)
_MESSAGE = 1500  # characters kept of an error message
POISONED = 70  # exit status of a process whose device no longer responds


class Report:
    """Append-only records of one section, from any thread. A record with the key of an earlier one replaces it.

    Attributes:
        path: file of the records.
        quick: tiny sizes, to see that the code runs.
        limits: known limits of this device, by source: under "gb_s" memory bandwidths (1e9 bytes), under
            "tflop_s" rates of bfloat16 products; by load, under "output_tokens_s" rates of section engine.
        alone: one step may run at a time: several ran when an earlier process of this section hung or died.
    """

    def __init__(
        self,
        path: pathlib.Path,
        *,
        seconds: float,
        quick: bool,
        limits: Mapping[str, Mapping[str, float]],
        alone: bool = False,
        answers: Callable[[], bool] | None = None,
    ) -> None:
        self.quick, self.limits, self.alone = quick, limits, alone
        self.path, self._end = path, time.monotonic() + seconds
        self._journal, self._answers = Journal(path), answers or (lambda: True)
        self._earlier = self._journal.progress()

    def put(self, key: str, **fields: Any) -> None:
        self._journal.put(key=key, **fields)
        print(json.dumps({"key": key, **fields}), flush=True)

    def found(self, key: str) -> dict[str, Any]:
        """Return the last record with this key, also from an earlier process; empty: none."""
        return next((record for record in read_records(self.path) if record["key"] == key), {})

    def wanted(self, step: str, *, anew: bool = False) -> bool:
        """Return whether no earlier process of this section finished this step or was killed in it.

        Args:
            anew: run the step even if an earlier process finished it: its result was lost with the process.
        """
        return step not in self._earlier.condemned and (anew or step not in self._earlier.ended)

    def time_for(self, step: str, seconds: float) -> bool:
        """Return whether a step is wanted and ``seconds`` are left; record a step that is not run for lack of time."""
        if not self.wanted(step) or self.left() >= seconds:
            return self.wanted(step)
        self.put(f"not run: {step}", reason="no time was left")
        return False

    def goes_on(self, what: str) -> None:
        """Record progress of a step, so that the patience of its section restarts."""
        self._journal.put(goes_on=what)

    def left(self) -> float:
        """Return the seconds until this section is stopped."""
        return self._end - time.monotonic()

    @contextlib.contextmanager
    def attempt(self, step: str) -> Iterator[None]:
        """Turn a failure of one step into a record, so that later steps still run. The caller checks `wanted` first.

        After a device error that makes the device unusable for this process, the process exits; a new one continues.
        """
        with self._journal.step(step):
            try:
                yield
            except FAILURES as error:
                message = f"{type(error).__name__}: {error}"[:_MESSAGE]
                if type(error).__name__ == "JaxRuntimeError" and not self._answers():
                    self._give_up(step, message)
                self.put(step, error=message)

    def _give_up(self, step: str, message: str) -> None:
        """Exit. If several steps run, no step is blamed: each of them will fail now, and the cause is unknown."""
        if len(self._journal.progress().running) == 1:
            self.put(step, ok=False, error=message)
        os._exit(POISONED)

    def bandwidth(self, moved: int, ms: float) -> dict[str, float]:
        """Return the GB/s of a call that moves ``moved`` bytes in ``ms``, and its share of each known bandwidth."""
        rate = moved / ms / 1e6
        return {"bytes": moved, "gb_s": round(rate, 2), **self._shares("gb_s", rate)}

    def rate(self, operations: int, ms: float) -> dict[str, float]:
        """Return the TFLOP/s of a call of ``operations`` flops in ``ms``, and its share of each known rate."""
        rate = operations / ms / 1e9
        return {"operations": operations, "tflop_s": round(rate, 2), **self._shares("tflop_s", rate)}

    def _shares(self, kind: str, rate: float) -> dict[str, float]:
        return {f"share_of_{name}": round(rate / limit, 4) for name, limit in self.limits.get(kind, {}).items()}


def read_records(path: pathlib.Path) -> list[dict[str, Any]]:
    """Read the records in the order of their first appearance, each as last written; a torn line is dropped."""
    return list({line["key"]: line for line in Journal(path).lines() if "key" in line}.values())
