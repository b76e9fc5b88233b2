"""Rules that must hold of a compiled step. Each gives what it found and the limit.

Those on launches are asked only where attention is a kernel: XLA's own path gathers pages in loops, of many small
kernels, and orders sequences by sorting. Of a program of several steps they ask the loop's body, and no more of the
loop than of any branch: that a command buffer holds it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from jaxinfer.sampling.reductions import LANES
from pallas_kernels.lora.mosaic import TILE_ROWS
from pallas_kernels.quant_matmul.xla import GPU_PIECE
from tools.check_programs.hlo import Instruction, Launch, Module
from tools.check_programs.work import Finding

BY_KERNEL = 9  # of a dense layer of a decode step whose products are the GEMM kernel's
KERNELS_PER_LAYER = 16  # of any other dense layer; with
OF_SUMS, OF_EXPERTS = 3, 24  # sums over devices; with experts: choosing them and gathering
OF_GROUPS, MANY = 5, 512  # of experts that more than so many tokens choose by groups
OF_ROUNDING = 3  # of each weight whose inputs are rounded: the largest of each token, its scale, what they become;
OF_ROUNDING_BY_KERNEL = 1  # in one kernel
OF_HEAD_NORMS = 5  # of queries and keys: both cut out of the projection, both normalised; at times the residual sum
OF_OUT_NORMS = 1  # of what the parts of a layer give: the residual sum, which no product's epilogue is
OF_STATES = 8  # of recurrences: places, convolution, gates, the recurrence, what pages keep
OF_CONVOLUTION = 5  # of each further one: gathered, convolved, turned, scattered, and what it is of put together
OF_STREAMS = 10  # of hidden states: predicted, normalised, corrected, gated
OF_BOTH = 6  # where a layer attends and recurs: each part and what it reads scaled on its own
MATRICES = 4  # of a dense layer, the activation between two of them; each further one is another kernel
OF_ADAPTERS = (
    4  # of each weight that has them: rows into tiles, two products, rows back; those of experts are dealt out
)
OF_ADAPTED_EXPERTS = 10  # anew for each layer
_WITHIN = 0.02
# Bytes of memory of `work.GPUS`, by NVIDIA's data sheets, and what `EngineConfig.memory_utilization` leaves of them.
_MEMORY = {"h100": 80e9, "h200": 141e9, "a100": 80e9, "l40s": 48e9}
_UTILIZATION = 0.9
# What is live at a time: arrays of float32 logits, and of the widest activation. A copy of one layer's pool or of the
# head would not fit.
_LOGITS, _ACTIVATIONS, _FIXED = 4.5, 4.5, 24 << 20
_RECURRENT = 2  # more of the latter, in float32
_CODES = 8  # bits of a stored number, at most
_PIECES = 4  # of dequantised weights, live at a time
# They lay out, convert or cut what they read, and compute nothing.
_MOVES = {"copy", "copy-start", "convert", "transpose", "slice", "dynamic-slice", "gather", "pad", "concatenate"}
_VIEWS = {"parameter", "bitcast", "get-tuple-element", "tuple", "while", "conditional", "call", "optimization-barrier"}
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "collective-broadcast",
)
FITS = "bytes of a device"
_IN_PLACE = {"scatter", "dynamic-update-slice"}
_REMATERIALISED = re.compile(r"[Ii]nvoluntary full rematerialization")


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled program and what is known of its arguments. All numbers are those of one device.

    Attributes:
        pool: elements of one layer's pool.
        tokens: that one call computes.
        widest: numbers of the widest activation of a token, logits aside.
        logits: of a token; 0 where none are made.
        layers, tail: GEMMs of each layer that is needed whole, and GEMMs behind those.
        sums, gathers, scatters: all-reduces, all-gathers and reduce-scatters that there should be.
        gathered: numbers of a token's hidden states, where those are gathered; else 0.
        donated, aliased: bytes of donated arguments, and how many of them results take over.
        temporaries: bytes that it needs while it runs.
        arguments, planned: bytes of all arguments, and what the engine plans with: weights, pool and sampler.
        waits: branches and loops whose predicates the host reads while the program runs.
        repeats: whether it is a loop of steps, whose GEMMs are in the loop.
        whole: whether it reads all of the stage's weights.
        experts: whether a layer is a mixture of them.
        states: whether layers keep any; ``both``: whether such a layer attends besides.
        convolutions: of a layer.
        streams: whether there are several of hidden states.
        head_norms: whether queries and keys are normalised; ``out_norms``: what the parts of a layer give.
        devices: over which the stage is spread.
        adapters: on the device, where rows have any.
        dequantised: whether stored weights become plain numbers, some output channels after the others.
        rounded: whether products of stored weights round their inputs.
        by_kernel: whether it is a plain decode step whose products, all that there are, are the GEMM kernel's.
    """

    name: str
    module: Module
    launches: list[Launch]
    pool: int
    tokens: int
    widest: int
    logits: int
    layers: tuple[int, ...]
    tail: int
    donated: int
    aliased: int
    temporaries: int
    arguments: int
    planned: int
    sums: int = 0
    gathers: int = 0
    scatters: int = 0
    gathered: int = 0
    waits: tuple[str, ...] = ()
    repeats: bool = False
    whole: bool = True
    experts: bool = False
    states: bool = False
    both: bool = False
    convolutions: int = 0
    streams: bool = False
    head_norms: bool = False
    out_norms: bool = False
    devices: int = 1
    adapters: int = 0
    dequantized: bool = False
    rounded: bool = False
    by_kernel: bool = False

    @property
    def largest(self) -> int:
        """Numbers of its largest activation."""
        in_tiles = self.tokens + self.adapters * TILE_ROWS[1]  # each adapter's last tile may be almost empty
        return max(in_tiles * self.widest, self.tokens * LANES * -(-self.logits // LANES))

    @property
    def ceiling(self) -> int:
        """Bytes that its temporaries may take."""
        activations = _ACTIVATIONS + _RECURRENT * self.states
        return (
            _FIXED
            + self.dequantized * _PIECES * GPU_PIECE
            + int(self.tokens * (_LOGITS * 4 * self.logits + activations * 2 * self.widest))
        )


def findings(step: Step) -> Iterator[Finding]:
    yield from _of_weights(step)
    yield Finding("donated bytes updated in place", str(step.aliased), str(step.donated), step.aliased == step.donated)
    yield _at_most("temporaries", step.temporaries, step.ceiling)
    if stored := stored_sizes(step):
        yield _at_most("plain numbers of stored weights", plain_bytes(step, stored), step.dequantized * GPU_PIECE)
    yield from _of_collectives(step)
    least = (1 - _WITHIN) * step.planned if step.whole else 0  # a chunk's program has no need of the head
    near = least <= step.arguments <= (1 + _WITHIN) * step.planned
    yield Finding("bytes of arguments, as planned", str(step.arguments), str(step.planned), near)
    yield from _of_launches(step)


def _of_weights(step: Step) -> Iterator[Finding]:
    gemms, wanted = sum(multiplied(step)), sum(step.layers) + step.tail
    asked = not step.dequantized and bool(step.layers)
    yield Finding("GEMMs with a weight", str(gemms), str(wanted), gemms == wanted, asked and not step.repeats)
    moved = moved_arrays(step)
    yield Finding("pools or weights copied, converted, cut", _list(moved), "none", not moved, asked)


def _of_collectives(step: Step) -> Iterator[Finding]:
    sums, gathers, scatters = (collectives(step, kind) for kind in ("all-reduce", "all-gather", "reduce-scatter"))
    others = sum(collectives(step, kind) for kind in _COLLECTIVES) - sums - gathers - scatters
    yield Finding("all-reduces", str(sums), str(step.sums), sums == step.sums)
    yield Finding("all-gathers", str(gathers), str(step.gathers), gathers == step.gathers)
    yield Finding("reduce-scatters", str(scatters), str(step.scatters), scatters == step.scatters)
    yield Finding("other collectives", str(others), "0", not others)
    gathered = gathered_arrays(step)
    yield Finding("gathered beside logits and hidden states", _list(gathered), "none", not gathered)


def _of_launches(step: Step) -> Iterator[Finding]:
    many = step.devices > 1
    of_kernels = not step.module.loops(step.repeats) and not step.dequantized
    asked = of_kernels or step.dequantized  # loops over weights are in the command buffer
    count, most = kernels_per_layer(step), BY_KERNEL if step.by_kernel else KERNELS_PER_LAYER
    most += OF_SUMS * many + (OF_EXPERTS + OF_GROUPS * (step.tokens > MANY)) * step.experts
    most += OF_STATES * step.states + OF_HEAD_NORMS * step.head_norms
    most += OF_OUT_NORMS * step.out_norms + OF_BOTH * step.both + OF_STREAMS * step.streams
    most += OF_CONVOLUTION * max(0, step.convolutions - 1)
    most += max(0, max(step.layers, default=0) - MATRICES) * (not step.experts)
    rounding = OF_ROUNDING_BY_KERNEL if step.by_kernel else OF_ROUNDING
    most += rounding * step.rounded * max(step.layers, default=0)
    if step.adapters:
        most += OF_ADAPTERS * max(step.layers, default=0) + OF_ADAPTED_EXPERTS * step.experts
    yield Finding("kernels a layer", f"{count:.1f}", str(most), count <= most, of_kernels)
    yield Finding("waits of the host", ", ".join(step.waits) or "none", "none", not step.waits, asked)
    sorts = step.module.sorts()
    # Where there is a GPU, XLA may leave them to a library, whose calls no command buffer holds: not seen here.
    yield Finding("sorts", _list(sorts), "none", not sorts, asked)
    buffers = {launch.buffer for launch in step.launches}
    # XLA's default leaves collectives out of command buffers.
    yield Finding("command buffers", _command_buffers(step), "1", buffers == {0}, asked and not many)


def _command_buffers(step: Step) -> str:
    outside = sum(launch.buffer is None for launch in step.launches)
    count = len({launch.buffer for launch in step.launches} - {None})
    return f"{count}, {outside} launches outside" if outside else str(count)


def of_stage(*, planned: int, compiled: int, weights: int, declared: int, target: str) -> Iterator[Finding]:
    """Check a whole pipeline stage, in bytes of a device.

    Args:
        planned, compiled: see `tools.check_programs.work.Part`.
        weights: of the planner; ``declared`` follows from the declarations of the parameters.
        target: one of `tools.check_programs.work.GPUS`.
    """
    yield Finding("weights, as declared", str(weights), str(declared), weights == declared)
    near = abs(compiled - planned) <= _WITHIN * planned
    yield Finding("bytes of a device, as planned", str(compiled), str(planned), near)
    yield _at_most(FITS, compiled, int(_UTILIZATION * _MEMORY[target]))


def of_partitioner(said: str) -> Finding:
    """``said``: all that XLA wrote to standard error."""
    count = len(_REMATERIALISED.findall(said))
    return Finding("arrays that the partitioner makes whole", str(count), "0", not count)


def _at_most(rule: str, found: int, limit: int) -> Finding:
    return Finding(rule, f"{found / 2**20:.0f} MiB", f"{limit / 2**20:.0f} MiB", found <= limit)


def _list(found: list[Instruction]) -> str:
    return "none" if not found else f"{len(found)}: {', '.join(_short(one) for one in found[:3])}"


def weight_gemms(step: Step) -> list[Instruction]:
    """GEMMs of the entry computation that read a parameter of the model: attention's own have none."""
    weights = {one.name for one in step.module.weights()}
    entry = step.module.computations[step.module.entry]
    return [one for one in entry if one.is_gemm and weights & {step.module.unpadded(name) for name in one.operands}]


def multiplied(step: Step) -> Iterator[int]:
    """Weights that each GEMM of these multiplies with: XLA makes one of several that have the same operand.

    What is not larger than an activation of one token may be a bias.
    """
    large = {one.name: one.weight for one in step.module.weights() if one.size > step.widest}
    for one in weight_gemms(step):
        yield max(1, len({large.get(step.module.unpadded(name)) for name in one.operands} - {None}))


def stored_sizes(step: Step) -> set[int]:
    """Elements of the arrays of codes that the model's quantised weights have."""
    return {one.size for one in step.module.weights() if one.bits <= _CODES}


def plain_bytes(step: Step, stored: set[int]) -> int:
    """Bytes of the largest array that a program makes of codes without multiplying them. What a loop first cuts out of
    them is not followed: there temporaries tell."""
    made = (one for one in step.module.readers(stored, _CODES) if one.is_plain and not one.is_gemm)
    return max((one.size * one.bits // 8 for one in made), default=0)


def moved_arrays(step: Step) -> list[Instruction]:
    """Results in memory as large as a pool or a weight, or larger than any activation, that are not written in place.

    A GEMM's result is an activation. A custom call that is aliased writes in place, as do scatters. What could be an
    activation by its size is not one if it is made of an argument that is as large: the scales of a norm are smaller.
    But a table's rows for the tokens of a call are, whatever is made of them in the same kernel.
    """
    sizes = {one.size for one in step.module.weights() if len(one.dims or ()) > 1 and one.size > step.widest}
    return [one for one in step.module.in_memory() if _is_moved(step, one, {*sizes, step.pool})]


def _is_moved(step: Step, one: Instruction, sizes: set[int]) -> bool:
    if one.opcode in _VIEWS or one.opcode in _IN_PLACE or one.is_gemm:
        return False
    if step.logits and one.dims == (step.tokens, step.logits):  # a weight may have as many numbers
        return False
    opcode = step.module.root_opcode(one) if one.opcode == "fusion" else one.opcode
    if opcode in _IN_PLACE or (one.opcode == "custom-call" and "output_to_operand_aliasing" in one.line):
        return False
    if one.size in sizes and one.size > step.largest:
        return True
    if one.size > step.largest:
        return one.size >= min(sizes)
    if step.module.holds(one, "gather") and [n for n in one.dims or () if n != 1][:1] == [step.tokens]:
        return False
    as_large = {size for size in sizes if size >= one.size}
    return opcode in _MOVES and one.size in sizes and step.module.reads_argument(one, as_large)


def collectives(step: Step, kind: str) -> int:
    """Exchanges among devices, each counted once whether or not it has an end of its own."""
    return sum(one.opcode in (kind, f"{kind}-start") for body in step.module.computations.values() for one in body)


def gathered_arrays(step: Step) -> list[Instruction]:
    """Arrays that all-gathers make, logits aside, and hidden states where they are spread over tokens."""
    gathers = ("all-gather", "all-gather-done")
    every = [one for body in step.module.computations.values() for one in body if one.opcode in gathers]
    return [one for one in every if one.size not in (step.tokens * step.logits, step.tokens * step.gathered)]


def kernels_per_layer(step: Step) -> float:
    """Launches from one layer's first GEMM to the last layer's first, a layer; those of loops counted once.

    Where there are more than two layers the first is not counted: XLA puts what all layers read (rotations, places in
    pages) before its first GEMM or behind it. Of a single layer, to what follows it.
    """
    if not step.layers:
        return 0
    ours = {one.name for body in step.module.computations.values() for one in body if one.is_gemm}
    at = [index for index, launch in enumerate(step.launches) if launch.is_gemm or launch.name in ours]
    # Where that is XLA's; a program of several passes has more of all.
    of_attention = 0 if step.repeats else (len(at) - sum(step.layers) - step.tail) // len(step.layers)
    before = step.layers[:1] if len(step.layers) > 2 else ()
    counted = step.layers[len(before) : -1] or step.layers
    begin = sum(before) + of_attention * len(before)
    end = begin + sum(counted) + of_attention * len(counted)
    return ([*at, len(step.launches)][end] - at[begin]) / len(counted)


def _short(one: Instruction) -> str:
    return f"{one.name} {list(one.dims or ())}"
