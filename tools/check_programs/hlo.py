"""Optimised HLO and XLA's dump of what it launches, read from their text."""

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
    """One line of HLO. ``dims`` are those of an array, and ``dtype`` its elements'; a tuple has None and nothing."""

    name: str
    dtype: str
    dims: tuple[int, ...] | None
    opcode: str
    operands: tuple[str, ...]
    line: str
    root: bool

    @property
    def size(self) -> int:
        """Elements; 0 for a tuple."""
        return 0 if self.dims is None else math.prod(self.dims)

    @property
    def bits(self) -> int:
        """Of an element."""
        found = re.search(r"\d+", self.dtype)
        return 8 if found is None else int(found[0])

    @property
    def is_plain(self) -> bool:
        """An array of floating-point numbers of 16 bits or more: activations, and weights that nobody has quantised."""
        return self.dtype.startswith(("f", "bf")) and self.bits >= 16

    @property
    def weight(self) -> str:
        """Of an argument that is a weight, or one of the arrays that a stored weight has: the weight's name."""
        found = re.search(r'op_name="(params.*?)(?:\.arrays\[.*?)?"', self.line)
        return "" if found is None else found[1]

    @property
    def is_gemm(self) -> bool:
        """A product with a weight: XLA's by Triton or cuBLAS, or the kernel for quantised ones or for experts."""
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
        """Computations that run inside a kernel, whose intermediate results never reach memory."""
        every = [one for body in self.computations.values() for one in body]
        return {name for one in every for how in ("calls", "to_apply") for name in one.called(how)}

    def in_memory(self) -> Iterator[Instruction]:
        """Instructions whose results lie in device memory."""
        for name, body in self.computations.items():
            if name not in self._inlined:
                yield from body

    def parameters(self) -> dict[int, Instruction]:
        """The program's arguments, by position."""
        found = {}
        for one in self.computations[self.entry]:
            if one.opcode == "parameter" and (number := re.search(r"parameter\((\d+)\)", one.line)):
                found[int(number[1])] = one
        return found

    def weights(self) -> list[Instruction]:
        """The arguments that are parameters of the model: those of the function's argument ``params``."""
        return [one for one in self.parameters().values() if 'op_name="params' in one.line]

    @functools.cached_property
    def _bodies(self) -> dict[str, dict[str, Instruction]]:
        return {place: {one.name: one for one in body} for place, body in self.computations.items()}

    def source(self, name: str, computation: str = "") -> str:
        """The array that an operand of a computation, the entry's unless named, is a view of."""
        body = self._bodies[computation or self.entry]
        while name in body and body[name].opcode == "bitcast":
            name = body[name].operands[0]
        return name

    def unpadded(self, name: str) -> str:
        """`source` of an operand of the entry; of one that is nothing but another array with zeros behind, that one's.

        XLA cuts the sums of a product of few rows into equal parts, and fills up what does not divide so.
        """
        name = self.source(name)
        one = self._bodies[self.entry].get(name)
        if one is None or one.opcode != "fusion" or len(one.operands) > 1 or self.root_opcode(one) != "pad":
            return name
        return self.source(one.operands[0])

    def reads_argument(self, one: Instruction, sizes: set[int]) -> bool:
        """Whether an operand may be an argument of these sizes: in a loop or a branch, whatever that was given."""
        place = next(name for name, body in self.computations.items() if one in body)
        return self._reads(one, place, self._arguments(place, sizes))

    def readers(self, sizes: set[int], bits: int) -> Iterator[Instruction]:
        """Instructions with results in memory of which that holds, where arguments are of at most so many bits."""
        for place, body in self.computations.items():
            given = set[str]() if place in self._inlined else self._arguments(place, sizes, bits)
            yield from (one for one in body if given and self._reads(one, place, given))

    def _reads(self, one: Instruction, place: str, given: set[str]) -> bool:
        return any(self.source(name, place) in given for name in one.operands)

    def _arguments(self, place: str, sizes: set[int], bits: int = 64) -> set[str]:
        """What a computation is given of these sizes and at most so many bits, by name."""
        given = {each.name for each in self.computations[place] if each.opcode == "parameter"}
        parts = [each for each in self.computations[place] if each.opcode == "get-tuple-element"]
        given |= {each.name for each in parts if each.operands[0] in given}
        fitting = [each for each in self.computations[place] if each.size in sizes and each.bits <= bits]
        return {each.name for each in fitting if each.name in given}

    def loops(self, repeats: bool = False) -> bool:
        """Whether the program has a loop at its top; ``repeats``: it is one, and its body is asked."""
        top = self.computations[self.entry]
        if repeats:
            (outer,) = (one for one in top if one.opcode == "while")
            top = self.computations[outer.called("body")[0]]
        return any(one.opcode == "while" for one in top)

    def sorts(self) -> list[Instruction]:
        """XLA's own, and the library's."""
        every = (one for body in self.computations.values() for one in body)
        return [one for one in every if one.opcode == "sort" or "cub_sort" in one.line]

    def holds(self, one: Instruction, opcode: str) -> bool:
        """Whether it is this operation, or a fusion of others with it."""
        inner = self.computations[one.called("calls")[0]] if one.opcode == "fusion" else ()
        return any(each.opcode == opcode for each in (one, *inner))

    def root_opcode(self, fusion: Instruction) -> str:
        """The last operation of a fusion, its views aside."""
        body = {one.name: one for one in self.computations[fusion.called("calls")[0]]}
        root = next(one for one in body.values() if one.root)
        while root.opcode == "bitcast" and root.operands[0] in body:
            root = body[root.operands[0]]
        return root.opcode


def read_module(text: str) -> Module:
    """Raises ValueError where there is no entry computation."""
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
# What is launched: the dumps ``*.thunk_sequence_after_thunk_passes.txt`` and ``*.thunk_metadata.txt``.


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel, copy or library call. ``buffer``: which command buffer (CUDA graph) of the program, if any."""

    kind: str
    name: str
    buffer: int | None

    @property
    def is_gemm(self) -> bool:
        return "gemm" in self.name or self.kind in ("kGemm", "kCublasLtMatmul")


# Thunks that launch nothing themselves.
_STRUCTURE = {"kCommandBuffer", "kConditional", "kWhile", "kSequential", "kAsyncStart", "kAsyncDone"}
# Those of them whose predicates the host reads, and waits for the device, unless a command buffer holds them.
_BRANCHES = {"kConditional", "kWhile"}
_ANNOTATED = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')
_THUNK = re.compile(r"(?P<indent> *)(?P<number>\d+): (?P<kind>k\w+)\s+\[[^\]]*\]\s*(?P<name>\S*)")


def read_launches(text: str, metadata: str = "") -> list[Launch]:
    """Everything that may be launched, in order, branches and bodies of loops once each.

    Args:
        metadata: which names the instructions behind custom calls; without it these have none.
    """
    names = {int(number): name for name, number in _ANNOTATED.findall(metadata)}
    return [
        Launch(kind, names.get(int(number), name) if kind == "kCustomCall" else name, buffer)
        for number, kind, name, buffer in _thunks(text)
        if kind not in _STRUCTURE
    ]


def read_waits(text: str) -> list[str]:
    """Branches and loops that no command buffer holds."""
    return [f"{kind} {number}" for number, kind, _, buffer in _thunks(text) if kind in _BRANCHES and buffer is None]


def _thunks(text: str) -> Iterator[tuple[str, str, str, int | None]]:
    """Number, kind and name of each, and which of the program's command buffers holds it."""
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
