"""Reports about kernels, read from the dumps of ptxas and of the disassembler, and their tables."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

# Instructions of interest in Hopper's and Ampere's machine code.
_TENSOR_CORES = ("HGMMA", "IGMMA", "QGMMA", "HMMA", "IMMA")
_COPIES = ("UTMALDG", "UTMASTG", "LDGSTS", "LDG", "STG")  # the first three are asynchronous
_LOCAL_MEMORY = ("LDL", "STL")
INSTRUCTIONS = (*_TENSOR_CORES, *_COPIES, "USETMAXREG", "BAR", "SYNCS", *_LOCAL_MEMORY)
_BARRIER_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel in one machine code. Sizes in bytes; shared memory a thread block, the rest a thread.

    ``instructions`` counts those of `INSTRUCTIONS` that occur, and all of them as "total"; None without disassembler.
    """

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_smem: int
    dynamic_smem: int
    instructions: dict[str, int] | None = None

    @property
    def spills(self) -> bool:
        return self.spill_stores + self.spill_loads > 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one configuration for one target. ``failure``: empty, or why it is not to be shipped."""

    op: str
    name: str
    target: str
    kernels: tuple[Kernel, ...] = ()
    failure: str = ""

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Outcome:
        return Outcome(**{**fields, "kernels": tuple(Kernel(**kernel) for kernel in fields["kernels"])})


# --------------------------------------------------------------------------------------------------------------
# Mosaic GPU's dumps of one kernel: NAME.ptxas, NAME.resources.txt and, with a disassembler, NAME.sass_ctrl.


def read_dumps(folder: pathlib.Path) -> tuple[Kernel, ...]:
    """Every kernel that was compiled while Mosaic GPU dumped into ``folder``."""
    return tuple(_read_kernel(path) for path in sorted(folder.glob("*.ptxas")))


def _read_kernel(ptxas: pathlib.Path) -> Kernel:
    sass = ptxas.with_suffix(".sass_ctrl")
    code = sass.read_text(encoding="utf-8") if sass.exists() else ""
    return Kernel(
        **read_ptxas(ptxas.read_text(encoding="utf-8")),
        dynamic_smem=read_resources(ptxas.with_suffix(".resources.txt").read_text(encoding="utf-8")),
        instructions=count_instructions(code) if code else None,
    )


def read_ptxas(text: str) -> dict[str, Any]:
    """Name, registers, spills, stack and static shared memory. Of functions that were not inlined, too.

    Raises:
        ValueError: it is no report of ptxas' with ``--verbose``.
    """
    entry = re.search(r"Compiling entry function '(\S+)'", text)
    registers = re.findall(r"Used (\d+) registers", text)
    if entry is None or not registers:
        raise ValueError(f"no report of ptxas: {text[:200]!r}")

    def largest(pattern: str) -> int:
        return max(map(int, re.findall(pattern, text)), default=0)

    return {
        "name": entry[1].removesuffix("_mosaic_gpu_kernel"),
        "registers": max(map(int, registers)),
        "stack": largest(r"(\d+) bytes stack frame"),
        "spill_stores": largest(r"(\d+) bytes spill stores"),
        "spill_loads": largest(r"(\d+) bytes spill loads"),
        "static_smem": largest(r"(\d+) bytes smem"),
    }


def read_resources(text: str) -> int:
    """Bytes of shared memory that a launch asks for: buffers, and the barriers behind them."""
    buffers = re.search(r"smem_scratch_bytes=(\d+)", text)
    if buffers is None:
        raise ValueError(f"no report of Mosaic GPU's resources: {text[:200]!r}")
    kinds = re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", text)
    return int(buffers[1]) + _BARRIER_BYTES * sum(int(barriers) * int(times) for barriers, times in kinds)


def count_instructions(sass: str) -> dict[str, int]:
    """Count each of `INSTRUCTIONS` in a disassembly, whatever its modifiers, and all as "total"."""
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", sass)
    found = collections.Counter(lines)
    return {**{name: found[name] for name in INSTRUCTIONS if found[name]}, "total": len(lines)}


# --------------------------------------------------------------------------------------------------------------
# Tables.

_HEADER = ("op", "configuration", "target", "kernel", "registers", "spills", "stack", "shared memory", "instructions")


def rows(outcomes: Iterable[Outcome]) -> list[tuple[str, ...]]:
    """One row a kernel; a configuration that failed before it had one gets a row of its own."""
    return [
        (outcome.op, outcome.name, outcome.target, *_cells(kernel))
        for outcome in outcomes
        for kernel in outcome.kernels or (None,)
    ]


def _cells(kernel: Kernel | None) -> tuple[str, ...]:
    if kernel is None:
        return ("none",) + ("",) * 5
    spills = f"{kernel.spill_stores}/{kernel.spill_loads}" if kernel.spills else "0"
    shared = f"{kernel.dynamic_smem} + {kernel.static_smem}"
    counts = kernel.instructions
    shown = "?" if counts is None else " ".join(f"{name} {count}" for name, count in counts.items())
    return (kernel.name, str(kernel.registers), spills, str(kernel.stack), shared, shown)


def as_table(outcomes: Iterable[Outcome]) -> str:
    """Format a table for a terminal."""
    lines = [_HEADER, *rows(outcomes)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def as_markdown(outcomes: Iterable[Outcome]) -> str:
    """Format the table of benchmarks/results/kernels.md."""
    lines: Sequence[Sequence[str]] = [_HEADER, ["---"] * len(_HEADER), *rows(outcomes)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
