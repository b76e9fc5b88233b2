"""Rules of the programs that swap pages to host memory and back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxinfer.engine.execution.compiled import temporary_bytes
from tools.check_programs.work import Finding

_FIXED = 1 << 20  # bytes in addition to the pages: ids
_START = re.compile(r"= \((?P<to>[^()]*(?:\(\d+\)[^()]*)*)\) copy-start\(")
_ON_HOST = "S(5)"  # memory space of the host in a layout
_EXCHANGES = re.compile(r" (?:all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(")


def of_moves(programs: Mapping[str, Any], *, page: int, donated: int) -> Iterator[Finding]:
    """Check the programs called ``export_N`` and ``restore_N``, which move N pages.

    Args:
        page: bytes of a page on a device.
        donated: bytes of the pools.
    """
    for name, program in programs.items():
        kind, _, count = name.partition("_")
        if kind in ("export", "restore"):
            yield from _of_move(name, program, int(count) * page, donated * (kind == "restore"))


def _of_move(name: str, program: Any, moved: int, donated: int) -> Iterator[Finding]:
    text, memory, pages = program.as_text(), program.memory_analysis(), int(name.partition("_")[2])
    found = copies(text)
    yield Finding(f"{name}: copies beside the program", str(found), str(pages), found == pages)
    on_host = memory.host_output_size_in_bytes + memory.host_argument_size_in_bytes
    yield Finding(f"{name}: bytes on the host", str(on_host), str(moved), on_host == moved)
    aliased = memory.alias_size_in_bytes
    yield Finding(f"{name}: bytes in place", str(aliased), str(donated), aliased == donated)
    used, most = temporary_bytes(program), 2 * moved + _FIXED  # pages, and those of each layer
    yield Finding(f"{name}: temporaries", str(used), str(most), used <= most)
    exchanged = len(_EXCHANGES.findall(text))
    yield Finding(f"{name}: exchanges", str(exchanged), "0", not exchanged)


def copies(text: str) -> int:
    """Count the asynchronous copies of a program in HLO between host and device memory."""
    return sum(_ON_HOST in found["to"] for found in _START.finditer(text))
