"""Reports about kernels, read from the dumps of ptxas and of the disassembler, and their tables."""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pallas_kernels.thread_block import MOST_NAMED_BARRIERS, REGISTER_STEP, REGISTERS, WARPGROUP, Block

# Instructions of interest in Hopper's and Ampere's machine code.
_TENSOR_CORES = ("HGMMA", "IGMMA", "QGMMA", "HMMA", "IMMA")
_COPIES = ("UTMALDG", "UTMASTG", "LDGSTS", "LDG", "STG")  # the first three are asynchronous
_LOCAL_MEMORY = ("LDL", "STL")
INSTRUCTIONS = (*_TENSOR_CORES, *_COPIES, "USETMAXREG", "BAR", "SYNCS", *_LOCAL_MEMORY)
_BARRIER_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel in one machine code. Sizes in bytes; shared memory per CTA, the rest per thread.

    Attributes:
        registers: registers of a thread at launch.
        threads: threads of a CTA.
        cluster: CTAs of a cluster; 1: there is none.
        named_barriers: named barriers that synchronise the threads of a CTA.
        arrivals: largest arrival count of an mbarrier.
        decrease, increase: registers per thread that a producer keeps, and that a consumer requests, with
            ``setmaxnreg``; 0: the kernel does not change them.
        instructions: counts of the `INSTRUCTIONS` that occur, and of all as "total"; None without disassembler.
    """

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_smem: int
    dynamic_smem: int
    threads: int = WARPGROUP
    cluster: int = 1
    named_barriers: int = 0
    arrivals: int = 1
    decrease: int = 0
    increase: int = 0
    instructions: dict[str, int] | None = None

    @property
    def spills(self) -> bool:
        return self.spill_stores + self.spill_loads > 0

    def faults(self, shared_memory: int) -> Iterator[str]:
        """Yield why a GPU would not launch the kernel, or it would hang or be slow there, in one sentence each.

        Args:
            shared_memory: most bytes of one CTA.
        """
        if self.spills:
            yield f"it spills: {self.spill_stores} bytes stored, {self.spill_loads} loaded"
        yield from Block(self.threads, self.dynamic_smem + self.static_smem, self.cluster, self.arrivals).faults(
            shared_memory
        )
        if self._launched * self.threads > REGISTERS:
            yield f"a block of {self.threads} threads with {self.registers} registers each cannot be launched"
        if self.named_barriers > MOST_NAMED_BARRIERS:
            yield f"it has {self.named_barriers} named barriers: there are {MOST_NAMED_BARRIERS}"
        if self._asked > self._owned:
            yield (
                f"it hangs: its warpgroups ask for {self._asked} registers (setmaxnreg {self.decrease}, "
                f"{self.increase}) and were launched with {self._owned}"
            )

    @property
    def _launched(self) -> int:
        """Registers of a thread, rounded up to the multiprocessor's allocation unit."""
        return -(-self.registers // REGISTER_STEP) * REGISTER_STEP

    @property
    def _owned(self) -> int:
        """Registers at launch, per thread, summed over the warpgroups of the CTA."""
        return self._launched * self.threads // WARPGROUP

    @property
    def _asked(self) -> int:
        """Registers that the warpgroups request, in the same unit: one producer, all others the most."""
        if not self.increase:
            return 0
        return self.decrease + self.increase * (self.threads // WARPGROUP - 1)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one configuration for one target. ``failure``: empty, or the reason not to ship it."""

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
# Mosaic GPU's dumps of one kernel: NAME.ptx, NAME.ptxas, NAME.resources.txt and, with a disassembler, NAME.sass_ctrl.


def read_dumps(folder: pathlib.Path) -> tuple[Kernel, ...]:
    """Return every kernel that was compiled while Mosaic GPU dumped into ``folder``."""
    return tuple(_read_kernel(path) for path in sorted(folder.glob("*.ptxas")))


def _read_kernel(ptxas: pathlib.Path) -> Kernel:
    sass = ptxas.with_suffix(".sass_ctrl")
    code = sass.read_text(encoding="utf-8") if sass.exists() else ""
    return Kernel(
        **read_ptxas(ptxas.read_text(encoding="utf-8")),
        **read_ptx(ptxas.with_suffix(".ptx").read_text(encoding="utf-8")),
        **read_resources(ptxas.with_suffix(".resources.txt").read_text(encoding="utf-8")),
        instructions=count_instructions(code) if code else None,
    )


def read_ptxas(text: str) -> dict[str, Any]:
    """Read name, registers, spills, stack, static SMEM and named barriers, functions that were not inlined included.

    Raises:
        ValueError: not a ptxas ``--verbose`` report, or ptxas rejected the kernel's ``setmaxnreg``.
    """
    entry = re.search(r"Compiling entry function '(\S+)'", text)
    used = re.findall(r"Used (\d+) registers", text)
    if entry is None or not used or "setmaxnreg" in text:
        raise ValueError(f"no report of ptxas, or one of setmaxnreg: {text[:400]!r}")

    def largest(pattern: str) -> int:
        return max(map(int, re.findall(pattern, text)), default=0)

    return {
        "name": entry[1].removesuffix("_mosaic_gpu_kernel"),
        "registers": max(map(int, used)),
        "stack": largest(r"(\d+) bytes stack frame"),
        "spill_stores": largest(r"(\d+) bytes spill stores"),
        "spill_loads": largest(r"(\d+) bytes spill loads"),
        "static_smem": largest(r"(\d+) bytes smem"),
        "named_barriers": largest(r"used (\d+) barriers"),
    }


def read_ptx(text: str) -> dict[str, Any]:
    """Read threads, cluster and ``setmaxnreg`` of a kernel in PTX.

    Raises:
        ValueError: its CTA has no fixed size.
    """
    block = re.search(r"\.(?:maxntid|reqntid)\s+(\d+), (\d+), (\d+)", text)
    cluster = re.search(r"\.reqnctapercluster\s+(\d+), (\d+), (\d+)", text)
    if block is None:
        raise ValueError(f"no size of a thread block in {text[:200]!r}")

    def asked(way: str) -> list[int]:
        return [int(count) for count in re.findall(rf"setmaxnreg\.{way}\.\S+\s+(\d+)", text)]

    return {
        "threads": math.prod(map(int, block.groups())),
        "cluster": math.prod(map(int, cluster.groups())) if cluster else 1,
        "decrease": max(asked("dec"), default=0),
        "increase": max(asked("inc"), default=0),
    }


def read_resources(text: str) -> dict[str, Any]:
    """Read the SMEM bytes of a launch (buffers, then mbarriers), and the largest arrival count."""
    buffers = re.search(r"smem_scratch_bytes=(\d+)", text)
    if buffers is None:
        raise ValueError(f"no report of Mosaic GPU's resources: {text[:200]!r}")
    kinds = re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", text)
    barriers = sum(int(count) * int(times) for count, times in kinds)
    return {
        "dynamic_smem": int(buffers[1]) + _BARRIER_BYTES * barriers,
        "arrivals": max(map(int, re.findall(r"arrival_count=(\d+)", text)), default=1),
    }


def count_instructions(sass: str) -> dict[str, int]:
    """Count each of `INSTRUCTIONS` in a disassembly, with any modifiers, and all as "total"."""
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", sass)
    found = collections.Counter(lines)
    return {**{name: found[name] for name in INSTRUCTIONS if found[name]}, "total": len(lines)}


# --------------------------------------------------------------------------------------------------------------
# Tables.

_HEADER = ("op", "configuration", "target", "kernel", "registers", "spills", "stack", "shared memory", "instructions")


def rows(outcomes: Iterable[Outcome]) -> list[tuple[str, ...]]:
    """Return one row per kernel; a configuration that failed without a kernel gets its own row."""
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
