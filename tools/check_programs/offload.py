"""Rules of programs with weights in host memory: their copies to the device overlap the computation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jaxinfer.engine.execution.compiled import temporary_bytes
from jaxinfer.planner.memory import HostWeights
from tools.check_programs.hlo import Instruction, Module, read_module
from tools.check_programs.work import Finding, Program

# Copies to the device of arrays in the host's memory space.
_FROM_HOST = re.compile(r"= \((?P<to>[^ ]+), [^ ]+S\(5\)[^ ]*, [^ ]+\) copy-start\(")
_IN_HOST = "S(5)"  # memory space of the host in a layout
_FIXED = 1 << 20  # bytes in addition to the buffers
_COMPUTES = ("fusion", "custom-call", "while", "conditional", "call")


def program_with_copies(executable: Any, host: HostWeights, plain: int) -> Program:
    """Return a compiled program with its findings.

    Args:
        host: what of its weights is in host memory.
        plain: temporaries of the program with all weights on the device.
    """
    memory, used = executable.memory_analysis(), temporary_bytes(executable)
    found = (*_findings(executable.as_text()), _on_host(memory, host), _buffers(used - plain, host))
    return Program(memory.argument_size_in_bytes, used, sums=0, gathers=0, kernels=0, findings=found)


def _on_host(memory: Any, host: HostWeights) -> Finding:
    found = memory.host_argument_size_in_bytes
    return Finding("bytes in host memory", str(found), str(host.bytes), found == host.bytes)


def _buffers(used: int, host: HostWeights) -> Finding:
    return Finding("bytes of buffers", str(used), str(host.buffers), used <= host.buffers + _FIXED)


def _findings(text: str) -> Iterator[Finding]:
    found, weights = list(copies(text)), _read(read_module(text))
    yield Finding("copies beside the program", str(len(found)), str(weights), len(found) == weights)
    alone = [name for name, computed in found if not computed]
    yield Finding("copies that nothing overlaps", ", ".join(alone) or "none", "none", not alone)


def _read(module: Module) -> int:
    """Count the arguments in host memory that the program reads: of a prompt's last layer only keys and values are
    needed."""
    read = {name for one in module.computations[module.entry] for name in one.operands}
    return sum(_IN_HOST in one.line.partition(" parameter(")[0] and one.name in read for one in module.weights())


def copies(text: str) -> Iterator[tuple[str, int]]:
    """Yield the asynchronous copies from the host in the order of their starts, each with the number of kernels and
    products between its start and its end."""
    for body in read_module(text).computations.values():
        ends = {one.operands[0]: place for place, one in enumerate(body) if one.opcode == "copy-done"}
        for place, one in enumerate(body):
            if (found := _FROM_HOST.search(one.line)) is not None and _IN_HOST not in found["to"]:
                yield one.name, sum(map(_computes, body[place : ends[one.name]]))


def _computes(one: Instruction) -> bool:
    return one.opcode in _COMPUTES
