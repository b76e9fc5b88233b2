"""What a section writes while it runs: one JSON line per record, so that a killed section loses only the last one."""

from __future__ import annotations

import contextlib
import json
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

# What JAX raises when a program does not compile or run (its own errors are RuntimeErrors) or is refused by us.
FAILURES = (RuntimeError, ValueError, TypeError, KeyError, ArithmeticError)
_MESSAGE = 1500  # characters kept of an error


class Report:
    """Append-only records of one section. A record with the key of an earlier one replaces it.

    Attributes:
        quick: tiny sizes, to see that the code runs.
        limits: memory bandwidths of this device that are known, in GB/s (1e9 bytes), by where they come from.
    """

    def __init__(self, path: pathlib.Path, *, seconds: float, quick: bool, limits: Mapping[str, float]) -> None:
        self.quick, self.limits = quick, limits
        self._path, self._end = path, time.monotonic() + seconds

    def put(self, key: str, **fields: Any) -> None:
        line = json.dumps({"key": key, **fields})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)

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
        shares = {f"share_of_{name}": round(rate / limit, 4) for name, limit in self.limits.items()}
        return {"bytes": moved, "gb_s": round(rate, 2), **shares}


def read_records(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records in the order of their first appearance, each as last written; a torn last line is left out."""
    records: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            records[record["key"]] = record
    return list(records.values())
