"""The GPU under test, queried without a framework."""

from __future__ import annotations

import subprocess
from typing import Any

from benchmarks.peers import machine


def describe() -> dict[str, Any]:
    """Return the name, driver and memory of the first GPU; without a GPU, the processor's name and ``gpu`` False."""
    found = _query("name,driver_version,memory.total")
    if found is None:
        return {"name": machine.cpu_name(), "gpu": False}
    name, driver, memory = found
    return {"name": name, "gpu": True, "driver": driver, "memory_mib": int(memory)}


def used_mib() -> int | None:
    """Return the MiB of the first GPU that all processes use together; None without a GPU."""
    found = _query("memory.used")
    return None if found is None else int(found[0])


def _query(fields: str) -> list[str] | None:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [word.strip() for word in done.stdout.splitlines()[0].split(",")]
