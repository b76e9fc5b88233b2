"""Records that a section writes while it runs, one JSON line each, beside marks of the steps that it takes.

A killed section loses only the step that ran (`pallas_kernels.supervise`): it is started again, and the steps that have
ended, or in which an earlier process hung or died, are left out.
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

# What JAX raises when a program does not compile or run (its own errors are RuntimeErrors) or is refused by us.
# And what an op, a kernel or a peer raises that is not there, or not there in this form.
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
_MESSAGE = 1500  # characters kept of an error
POISONED = 70  # exit status of a process whose device does not answer any more


class Report:
    """Append-only records of one section, from any thread. A record with the key of an earlier one replaces it.

    Attributes:
        path: of the records.
        quick: tiny sizes, to see that the code runs.
        limits: what is known of this device, by where it comes from: under "gb_s" memory bandwidths (1e9 bytes), under
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
        """The record that was last written with this key, by an earlier process too; empty: none."""
        return next((record for record in read_records(self.path) if record["key"] == key), {})

    def wanted(self, step: str, *, anew: bool = False) -> bool:
        """Whether no earlier process of this section was through with a step, or was killed in it.

        Args:
            anew: an earlier process being through with it does not count: what it left was lost.
        """
        return step not in self._earlier.condemned and (anew or step not in self._earlier.ended)

    def time_for(self, step: str, seconds: float) -> bool:
        """Whether a step is wanted, and so many seconds are left; if not, a record says that it was not run."""
        if not self.wanted(step) or self.left() >= seconds:
            return self.wanted(step)
        self.put(f"not run: {step}", reason="no time was left")
        return False

    def goes_on(self, what: str) -> None:
        """Write that a step got somewhere, so that the patience of its section begins anew."""
        self._journal.put(goes_on=what)

    def left(self) -> float:
        """Seconds until this section is stopped."""
        return self._end - time.monotonic()

    @contextlib.contextmanager
    def attempt(self, step: str) -> Iterator[None]:
        """Turn a failure of one step into a record, so that the others still run. The caller asks `wanted` first.

        After an error of the device that leaves it unusable for this process, the process ends; another one goes on.
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
        """Where several steps run, each of them will fail now, and none says whose fault that is."""
        if len(self._journal.progress().running) == 1:
            self.put(step, ok=False, error=message)
        os._exit(POISONED)

    def bandwidth(self, moved: int, ms: float) -> dict[str, float]:
        """GB/s of a call that moves ``moved`` bytes in ``ms``, and its share of each known bandwidth."""
        rate = moved / ms / 1e6
        return {"bytes": moved, "gb_s": round(rate, 2), **self._shares("gb_s", rate)}

    def rate(self, operations: int, ms: float) -> dict[str, float]:
        """TFLOP/s of a call that does so many floating-point operations, and its share of each known rate."""
        rate = operations / ms / 1e9
        return {"operations": operations, "tflop_s": round(rate, 2), **self._shares("tflop_s", rate)}

    def _shares(self, kind: str, rate: float) -> dict[str, float]:
        return {f"share_of_{name}": round(rate / limit, 4) for name, limit in self.limits.get(kind, {}).items()}


def read_records(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records in the order of their first appearance, each as last written; a torn line is left out."""
    return list({line["key"]: line for line in Journal(path).lines() if "key" in line}.values())
