"""Records that a section writes while it runs, one JSON line each: a killed section loses only the last one."""

from __future__ import annotations

import contextlib
import json
import pathlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

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


class Report:
    """Append-only records of one section, from any thread. A record with the key of an earlier one replaces it.

    Attributes:
        path: of the records.
        quick: tiny sizes, to see that the code runs.
        limits: what is known of this device, by where it comes from: under "gb_s" memory bandwidths (1e9 bytes), under
            "tflop_s" rates of bfloat16 products; by load, under "output_tokens_s" rates of section engine.
    """

    def __init__(
        self, path: pathlib.Path, *, seconds: float, quick: bool, limits: Mapping[str, Mapping[str, float]]
    ) -> None:
        self.quick, self.limits = quick, limits
        self.path, self._end = path, time.monotonic() + seconds
        self._lock = threading.Lock()

    def put(self, key: str, **fields: Any) -> None:
        line = json.dumps({"key": key, **fields})
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            print(line, flush=True)

    def time_for(self, what: str, seconds: float) -> bool:
        """Whether so many seconds are left; if not, a record says that ``what`` was not run."""
        if self.left() >= seconds:
            return True
        self.put(f"not run: {what}", reason="no time was left")
        return False

    def left(self) -> float:
        """Seconds until this section is stopped."""
        return self._end - time.monotonic()

    @contextlib.contextmanager
    def attempt(self, key: str) -> Iterator[None]:
        """Turn a failure of one item into a record, so that the others still run."""
        try:
            yield
        except FAILURES as error:
            self.put(key, error=f"{type(error).__name__}: {error}"[:_MESSAGE])

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
    """The records in the order of their first appearance, each as last written; a torn last line is left out."""
    records: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            records[record["key"]] = record
    return list(records.values())
