"""The machine under test: its processor, cores and load."""

from __future__ import annotations

import os
import pathlib
import platform
import re
from typing import Any


def cpu_name() -> str:
    """Return the processor's name as Linux reports it; elsewhere its architecture."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()


def slug(text: str) -> str:
    """Convert ``text`` for use in a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def usable_cores() -> list[int]:
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))


def keep_to_cores(count: int) -> None:
    """Bind this process and its future children to ``count`` cores: XLA sizes its thread pool by that."""
    bind = getattr(os, "sched_setaffinity", None)
    if bind is not None:
        bind(0, usable_cores()[:count])


def describe(threads: int) -> dict[str, Any]:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_bytes": pages,
        "system": platform.platform(),
    }


def busy_seconds() -> float:
    """Return the CPU seconds that this machine has used on all cores, stolen time included; 0 without /proc."""
    try:
        first = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, first.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
