"""Parsers of optimised HLO and of XLA's dump of launched thunks."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%(?P<name>\S+) = (?P<type>\(.*?\)|\w+\[[\d,]*\]\S*) (?P<opcode>[a-z][\w-]*)\("
)
_HEADER = re.compile(r"^(?:(?P<entry>ENTRY) )?%(?P<name>\S+) \(.*\{$")
_GEMM = re.compile(
    r'"kind":"__triton_(?:nested_)?gemm\w*"|custom_call_target="__cublas'
    r'|custom_call_target="mosaic_gpu.*/(?:(?:quant|grouped)_)?matmul/'
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO. ``dims`` and ``dtype`` are those of an array; for a tuple they are None and empty."""

    name: str
    dtype: str
    dims: tuple[int, ...] | None
    opcode: str
    operands: tuple[str, ...]
    line: str
    root: bool

    @property
    def size(self) -> int:
        """Number of elements; 0 for a tuple."""
        return 0 if self.dims is None else math.prod(self.dims)

    @property
    def bits(self) -> int:
        """Bits of an element."""
        found = re.search(r"\d+", self.dtype)
        return 8 if found is None else int(found[0])

    @property
    def is_plain(self) -> bool:
        """Whether this is an array of floats of 16 bits or more: an activation or an unquantized weight."""
        return self.dtype.startswith(("f", "bf")) and self.bits >= 16

    @property
    def weight(self) -> str:
        """Name of the weight that this argument is, or is an array of (if quantised); "" if none."""
        found = re.search(r'op_name="(params.*?)(?:\.arrays\[.*?)?"', self.line)
        return "" if found is None else found[1]

    @property
    def is_gemm(self) -> bool:
        """Whether this is a product with a weight: by Triton, cuBLAS, or the kernel for codes or experts."""
        return self.opcode in ("fusion", "custom-call") and _GEMM.search(self.line) is not None

    def called(self, how: str) -> list[str]:
        return re.findall(rf"\b{how}=%([\w.-]+)", self.line)


@dataclasses.dataclass(frozen=True)
class Module:
    """An optimised program."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str

    @functools.cached_property
    def _inlined(self) -> set[str]:
        """Computations that run inside a kernel: their intermediate results never reach memory."""
        every = [one for body in self.computations.values() for one in body]
        return {name for one in every for how in ("calls", "to_apply") for name in one.called(how)}

    def in_memory(self) -> Iterator[Instruction]:
        """Yield the instructions with results in device memory."""
        for name, body in self.computations.items():
            if name not in self._inlined:
                yield from body

    def parameters(self) -> dict[int, Instruction]:
        """Return the program's arguments, by position."""
        found = {}
        for one in self.computations[self.entry]:
            if one.opcode == "parameter" and (number := re.search(r"parameter\((\d+)\)", one.line)):
                found[int(number[1])] = one
        return found

    def weights(self) -> list[Instruction]:
        """Return the arguments that are model parameters: those of the function's argument ``params``."""
        return [one for one in self.parameters().values() if 'op_name="params' in one.line]

    @functools.cached_property
    def _bodies(self) -> dict[str, dict[str, Instruction]]:
        return {place: {one.name: one for one in body} for place, body in self.computations.items()}

    def source(self, name: str, computation: str = "") -> str:
        """Return the array that an operand is a view of; ``computation``: default the entry computation."""
        body = self._bodies[computation or self.entry]
        while name in body and body[name].opcode == "bitcast":
            name = body[name].operands[0]
        return name

    def unpadded(self, name: str) -> str:
        """Return the `source` of an operand of the entry; for a zero-padded copy of an array, the source of that array.

        XLA splits the sums of a product of few rows into equal chunks, and pads the operand where it does not divide.
        """
        name = self.source(name)
        one = self._bodies[self.entry].get(name)
        if one is None or one.opcode != "fusion" or len(one.operands) > 1 or self.root_opcode(one) != "pad":
            return name
        return self.source(one.operands[0])

    def reads_argument(self, one: Instruction, sizes: set[int]) -> bool:
        """Return whether an operand may be an argument of these sizes; in a loop or branch, an argument of its body."""
        place = next(name for name, body in self.computations.items() if one in body)
        return self._reads(one, place, self._arguments(place, sizes))

    def readers(self, sizes: set[int], bits: int) -> Iterator[Instruction]:
        """Yield instructions with results in memory that read such an argument, of at most ``bits`` bits."""
        for place, body in self.computations.items():
            given = set[str]() if place in self._inlined else self._arguments(place, sizes, bits)
            yield from (one for one in body if given and self._reads(one, place, given))

    def _reads(self, one: Instruction, place: str, given: set[str]) -> bool:
        return any(self.source(name, place) in given for name in one.operands)

    def _arguments(self, place: str, sizes: set[int], bits: int = 64) -> set[str]:
        """Return the names of a computation's arguments of these sizes and at most ``bits`` bits an element."""
        given = {each.name for each in self.computations[place] if each.opcode == "parameter"}
        parts = [each for each in self.computations[place] if each.opcode == "get-tuple-element"]
        given |= {each.name for each in parts if each.operands[0] in given}
        fitting = [each for each in self.computations[place] if each.size in sizes and each.bits <= bits]
        return {each.name for each in fitting if each.name in given}

    def loops(self, repeats: bool = False) -> bool:
        """Return whether the entry has a loop; ``repeats``: it is one loop, and its body is searched instead."""
        top = self.computations[self.entry]
        if repeats:
            (outer,) = (one for one in top if one.opcode == "while")
            top = self.computations[outer.called("body")[0]]
        return any(one.opcode == "while" for one in top)

    def sorts(self) -> list[Instruction]:
        """Return the sorts, those of XLA and of the CUB library."""
        every = (one for body in self.computations.values() for one in body)
        return [one for one in every if one.opcode == "sort" or "cub_sort" in one.line]

    def holds(self, one: Instruction, opcode: str) -> bool:
        """Return whether the instruction is this operation, or a fusion that contains it."""
        inner = self.computations[one.called("calls")[0]] if one.opcode == "fusion" else ()
        return any(each.opcode == opcode for each in (one, *inner))

    def root_opcode(self, fusion: Instruction) -> str:
        """Return the last operation of a fusion, ignoring views."""
        body = {one.name: one for one in self.computations[fusion.called("calls")[0]]}
        root = next(one for one in body.values() if one.root)
        while root.opcode == "bitcast" and root.operands[0] in body:
            root = body[root.operands[0]]
        return root.opcode


def read_module(text: str) -> Module:
    """Parse a module. Raises ValueError where there is no entry computation."""
    computations: dict[str, list[Instruction]] = {}
    body: list[Instruction] = []
    entry = None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            body = computations.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        elif found := _INSTRUCTION.match(line):
            body.append(_instruction(line, found))
    if entry is None:
        raise ValueError("no entry computation in what should be HLO")
    return Module({name: tuple(body) for name, body in computations.items()}, entry)


def _instruction(line: str, found: re.Match[str]) -> Instruction:
    array = re.match(r"(\w+)\[([\d,]*)\]", found["type"])
    dtype, dims = ("", None) if array is None else (array[1], tuple(int(dim) for dim in array[2].split(",") if dim))
    operands = re.findall(r"%([\w.-]+)", line[found.end() :].partition(")")[0])
    root = "ROOT %" in line[: found.end()]
    return Instruction(found["name"], dtype, dims, found["opcode"], tuple(operands), line, root)


# --------------------------------------------------------------------------------------------------------------
# Launches: the dumps ``*.thunk_sequence_after_thunk_passes.txt`` and ``*.thunk_metadata.txt``.


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel, copy or library call. ``buffer``: its command buffer (CUDA graph) in the program, if any."""

    kind: str
    name: str
    buffer: int | None

    @property
    def is_gemm(self) -> bool:
        return "gemm" in self.name or self.kind in ("kGemm", "kCublasLtMatmul")


# Thunks that launch no work themselves.
_STRUCTURE = {"kCommandBuffer", "kConditional", "kWhile", "kSequential", "kAsyncStart", "kAsyncDone"}
# Thunks whose predicates the host reads, which waits for the device, unless a command buffer contains them.
_BRANCHES = {"kConditional", "kWhile"}
_ANNOTATED = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')
_THUNK = re.compile(r"(?P<indent> *)(?P<number>\d+): (?P<kind>k\w+)\s+\[[^\]]*\]\s*(?P<name>\S*)")


def read_launches(text: str, metadata: str = "") -> list[Launch]:
    """Return everything that may be launched, in order, branches and bodies of loops once each.

    Args:
        metadata: names of the instructions of custom calls; without it these have none.
    """
    names = {int(number): name for name, number in _ANNOTATED.findall(metadata)}
    return [
        Launch(kind, names.get(int(number), name) if kind == "kCustomCall" else name, buffer)
        for number, kind, name, buffer in _thunks(text)
        if kind not in _STRUCTURE
    ]


def read_waits(text: str) -> list[str]:
    """Return the branches and loops outside command buffers."""
    return [f"{kind} {number}" for number, kind, _, buffer in _thunks(text) if kind in _BRANCHES and buffer is None]


def _thunks(text: str) -> Iterator[tuple[str, str, str, int | None]]:
    """Yield the number, kind and name of each thunk, and the command buffer of the program that contains it."""
    buffers, depth = -1, None
    for line in text.splitlines():
        if (found := _THUNK.match(line)) is None:
            continue
        indent, kind = len(found["indent"]), found["kind"]
        if depth is not None and indent <= depth:
            depth = None
        if kind == "kCommandBuffer" and depth is None:
            buffers, depth = buffers + 1, indent
        yield found["number"], kind, found["name"], None if depth is None else buffers
