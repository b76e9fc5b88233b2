"""Rules that must hold of a compiled step. Each reports its finding and the limit.

Rules on launches apply only where attention is a kernel: XLA's own path gathers pages in loops, of many small
kernels, and orders sequences by sorting. In a program of several steps they apply to the loop's body; of the loop they
require the same as of any branch: that a command buffer contains it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterator

from jaxinfer.sampling.reductions import LANES
from pallas_kernels.lora.mosaic import TILE_ROWS
from pallas_kernels.quant_matmul.xla import GPU_PIECE
from tools.check_programs.hlo import Instruction, Launch, Module
from tools.check_programs.work import Finding

BY_KERNEL = 9  # kernels of a dense layer of a decode step whose products are all by the GEMM kernel
KERNELS_PER_LAYER = 16  # kernels of any other dense layer; additional kernels:
OF_SUMS, OF_EXPERTS = 3, 24  # sums over devices; with experts: routing and gathering
OF_GROUPS, MANY = 5, 512  # group-limited routing, with more than MANY tokens
OF_ROUNDING = 3  # of each weight with quantised inputs: the maximum of each token, its scale, the codes;
OF_ROUNDING_BY_KERNEL = 1  # the same in one kernel
OF_HEAD_NORMS = 5  # of QK norms: both split from the projection, both normalised; at times the residual sum
OF_OUT_NORMS = 1  # of norms on sublayer outputs: the residual sum, which cannot be fused into a GEMM epilogue
OF_STATES = 8  # of recurrences: positions, convolution, gates, the recurrence, the states kept in pages
OF_CONVOLUTION = 5  # of each further convolution: gather, convolution, transpose, scatter, concatenation of its input
OF_STREAMS = 10  # of AltUp streams of hidden states: predicted, normalised, corrected, gated
OF_BOTH = 6  # of a layer with both attention and recurrence: each output and input scaled separately
OF_SCORES = 2  # of attention of a vision tower, which is XLA's: its scores, their softmax, the sum of the values
MATRICES = 4  # of a dense layer, with the activation between two of them; each further matrix is another kernel
OF_ADAPTERS = (
    4  # of each weight with adapters: rows into tiles, two products, rows back; for experts, rows are assigned to tiles
)
OF_ADAPTED_EXPERTS = 10  # again in each layer
_WITHIN = 0.02
# Bytes of memory of `work.GPUS`, by NVIDIA's data sheets, and the usable share (`EngineConfig.memory_utilization`).
_MEMORY = {"h100": 80e9, "h200": 141e9, "a100": 80e9, "l40s": 48e9}
_UTILIZATION = 0.9
# Arrays live at a time: float32 logits, and the widest activation. A copy of one layer's pool or of the head would not
# fit.
_LOGITS, _ACTIVATIONS, _FIXED = 4.5, 4.5, 24 << 20
_SCORES = 8  # bytes of a score: in float32, and those of the block before or its weights
_RECURRENT = 2  # further activations, in float32
_CODES = 8  # most bits of a quantised code
_PIECES = 4  # chunks of dequantised weights, live at a time
# Operations that lay out, convert or slice their operand, and compute nothing.
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
_HOST = re.compile(r"S\(5\)| (?:infeed|outfeed|send|recv)\(")
_IN_PLACE = {"scatter", "dynamic-update-slice"}
_SPILLS = re.compile(r"Registers are spilled to local memory in function '(\S+?)', (\d+) bytes")
_SPILLED = 160  # bytes of a thread that one of XLA's own kernels may spill: a reduction here and there does
_LEAST_ROWS = 8  # rows to which XLA pads fewer of an expert
_REMATERIALISED = re.compile(r"[Ii]nvoluntary full rematerialization")


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled program and the properties of its arguments. All numbers are per device.

    Attributes:
        pool: elements of one layer's pool.
        tokens: tokens that one call computes.
        widest: elements of the widest activation of a token, except logits.
        logits: logits of a token; 0 for a program without logits.
        layers, tail: GEMMs of each layer that is computed whole, and GEMMs after those.
        sums, gathers, scatters: expected all-reduces, all-gathers and reduce-scatters.
        gathered: elements of a token's hidden states, where those are gathered; else 0.
        donated, aliased: bytes of donated arguments, and the bytes of them that results reuse.
        temporaries: bytes of temporary buffers.
        arguments, planned: bytes of all arguments, and the engine's plan of them: weights, pool and sampler.
        waits: branches and loops whose predicates the host reads while the program runs.
        repeats: whether it is a loop of steps, whose GEMMs are in the loop.
        whole: whether it reads all of the stage's weights.
        experts: whether a layer is a mixture of experts.
        states: whether layers keep recurrent states; ``both``: whether such a layer has attention, too.
        convolutions: convolutions of a layer.
        streams: whether there are several streams of hidden states.
        head_norms: whether queries and keys are normalised; ``out_norms``: whether sublayer outputs are.
        devices: number of devices of the stage.
        adapters: adapters on the device, if rows may have adapters.
        dequantized: whether stored weights are dequantised, one slice of output channels after the other.
        rounded: whether products of stored weights quantise their inputs.
        scores: attention scores that are live at once, of a vision tower; 0: a kernel's.
        by_kernel: whether it is an ordinary decode step with all products by the GEMM kernel.
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
    scores: int = 0
    by_kernel: bool = False

    @property
    def largest(self) -> int:
        """Elements of its largest activation."""
        in_tiles = (
            max(self.tokens, _LEAST_ROWS * self.experts) + self.adapters * TILE_ROWS[1]
        )  # each adapter's last tile may be almost empty
        return max(self.scores, in_tiles * self.widest, self.tokens * LANES * -(-self.logits // LANES))

    @property
    def ceiling(self) -> int:
        """Limit of the bytes of its temporaries."""
        activations = _ACTIVATIONS + _RECURRENT * self.states
        return (
            _FIXED
            + self.dequantized * _PIECES * GPU_PIECE
            + int(_SCORES * self.scores + self.tokens * (_LOGITS * 4 * self.logits + activations * 2 * self.widest))
        )


def findings(step: Step) -> Iterator[Finding]:
    yield from _of_weights(step)
    yield Finding("donated bytes updated in place", str(step.aliased), str(step.donated), step.aliased == step.donated)
    yield _at_most("temporaries", step.temporaries, step.ceiling)
    if stored := stored_sizes(step):
        yield _at_most("plain numbers of stored weights", plain_bytes(step, stored), step.dequantized * GPU_PIECE)
    yield from _of_collectives(step)
    least = (1 - _WITHIN) * step.planned if step.whole else 0  # a prefill chunk's program does not need the head
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
    asked = of_kernels or step.dequantized or step.scores > 0  # their loops are in the command buffer
    count, most = kernels_per_layer(step), BY_KERNEL if step.by_kernel else KERNELS_PER_LAYER
    most += OF_SUMS * many + (OF_EXPERTS + OF_GROUPS * (step.tokens > MANY)) * step.experts
    most += OF_STATES * step.states + OF_HEAD_NORMS * step.head_norms
    most += OF_OUT_NORMS * step.out_norms + OF_BOTH * step.both + OF_STREAMS * step.streams
    most += OF_SCORES * (step.scores > 0)
    most += OF_CONVOLUTION * max(0, step.convolutions - 1)
    most += max(0, max(step.layers, default=0) - MATRICES) * (not step.experts)
    rounding = OF_ROUNDING_BY_KERNEL if step.by_kernel else OF_ROUNDING
    most += rounding * step.rounded * max(step.layers, default=0)
    if step.adapters:
        most += OF_ADAPTERS * max(step.layers, default=0) + OF_ADAPTED_EXPERTS * step.experts
    yield Finding("kernels a layer", f"{count:.1f}", str(most), count <= most, of_kernels)
    crossed = _HOST.findall("\n".join(one.line for one in step.module.in_memory()))
    yield Finding("transfers to or from the host", str(len(crossed)), "0", not crossed)
    yield Finding("waits of the host", ", ".join(step.waits) or "none", "none", not step.waits, asked)
    sorts = step.module.sorts()
    # On a GPU, XLA may leave sorts to a library, whose calls no command buffer contains: not visible here.
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
        weights: bytes by the planner; ``declared``: bytes by the declarations of the parameters.
        target: one of `tools.check_programs.work.GPUS`.
    """
    yield Finding("weights, as declared", str(weights), str(declared), weights == declared)
    near = abs(compiled - planned) <= _WITHIN * planned
    yield Finding("bytes of a device, as planned", str(compiled), str(planned), near)
    yield _at_most(FITS, compiled, int(_UTILIZATION * _MEMORY[target]))


def of_assembler(said: str) -> Finding:
    """Check the standard error of XLA, ``said``, for kernels whose registers do not suffice: XLA's own may spill a
    little."""
    found = [name for name, size in _SPILLS.findall(said) if int(size) > (_SPILLED if "fusion" in name else 0)]
    return Finding("kernels that spill registers", ", ".join(found[:3]) or "none", "none", not found)


def of_partitioner(said: str) -> Finding:
    """Check XLA's standard error, ``said``, for arrays that the partitioner rematerialises."""
    count = len(_REMATERIALISED.findall(said))
    return Finding("arrays that the partitioner makes whole", str(count), "0", not count)


def _at_most(rule: str, found: int, limit: int) -> Finding:
    return Finding(rule, f"{found / 2**20:.0f} MiB", f"{limit / 2**20:.0f} MiB", found <= limit)


def _list(found: list[Instruction]) -> str:
    return "none" if not found else f"{len(found)}: {', '.join(_short(one) for one in found[:3])}"


def weight_gemms(step: Step) -> list[Instruction]:
    """Return the GEMMs of the entry computation that read a model parameter, which excludes those of attention."""
    weights = {one.name for one in step.module.weights()}
    entry = step.module.computations[step.module.entry]
    return [one for one in entry if one.is_gemm and weights & {step.module.unpadded(name) for name in one.operands}]


def multiplied(step: Step) -> Iterator[int]:
    """Yield the number of weights of each of these GEMMs: XLA merges several GEMMs with the same operand.

    Operands not larger than an activation of one token may be biases.
    """
    large = {one.name: one.weight for one in step.module.weights() if one.size > step.widest}
    for one in weight_gemms(step):
        yield max(1, len({large.get(step.module.unpadded(name)) for name in one.operands} - {None}))


def stored_sizes(step: Step) -> set[int]:
    """Return the element counts of the code arrays of the model's quantised weights."""
    return {one.size for one in step.module.weights() if one.bits <= _CODES}


def plain_bytes(step: Step, stored: set[int]) -> int:
    """Return the bytes of the largest array that a program dequantises without multiplying it. Slices of codes taken in
    a loop are not followed: the temporaries show those."""
    made = (one for one in step.module.readers(stored, _CODES) if one.is_plain and not one.is_gemm)
    return max((one.size * one.bits // 8 for one in made), default=0)


def moved_arrays(step: Step) -> list[Instruction]:
    """Return results in memory as large as a pool or a weight, or larger than activations, not written in place.

    A GEMM's result is an activation. An aliased custom call writes in place, as do scatters. A result of the size of an
    activation counts if it is made of an argument as large: the scales of a norm are smaller. A weight that is copied
    with padding counts whatever its size. A table's rows for the tokens of a call do not count, nor results computed
    from them in the same kernel.
    """
    large = {one.name: one.size for one in step.module.weights() if len(one.dims or ()) > 1 and one.size > step.widest}
    sizes = {*large.values(), step.pool}
    return [one for one in step.module.in_memory() if _is_filled(step, one, large) or _is_moved(step, one, sizes)]


def _is_filled(step: Step, one: Instruction, weights: Container[str]) -> bool:
    """Return whether an instruction copies one of these weights with padding."""
    return one.opcode == "fusion" and step.module.unpadded(one.name) in weights


def _is_moved(step: Step, one: Instruction, sizes: set[int]) -> bool:
    if one.opcode in _VIEWS or one.opcode in _IN_PLACE or one.is_gemm:
        return False
    if step.logits and one.dims == (step.tokens, step.logits):  # a weight may have as many elements
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
    """Count collectives among devices; an asynchronous pair counts once."""
    return sum(one.opcode in (kind, f"{kind}-start") for body in step.module.computations.values() for one in body)


def gathered_arrays(step: Step) -> list[Instruction]:
    """Return the results of all-gathers, except logits, and except hidden states that are sharded over tokens."""
    gathers = ("all-gather", "all-gather-done")
    every = [one for body in step.module.computations.values() for one in body if one.opcode in gathers]
    return [one for one in every if one.size not in (step.tokens * step.logits, step.tokens * step.gathered)]


def kernels_per_layer(step: Step) -> float:
    """Return launches per layer, from one layer's first GEMM to the last layer's first; launches in loops count once.

    With more than two layers the first is not counted: XLA puts computations for all layers (rotations, positions in
    pages) before its first GEMM or after it. A single layer is counted up to the next GEMM.
    """
    if not step.layers:
        return 0
    ours = {one.name for body in step.module.computations.values() for one in body if one.is_gemm}
    at = [index for index, launch in enumerate(step.launches) if launch.is_gemm or launch.name in ours]
    # GEMMs of attention on XLA's path; a program of several steps repeats all of them.
    of_attention = 0 if step.repeats else (len(at) - sum(step.layers) - step.tail) // len(step.layers)
    before = step.layers[:1] if len(step.layers) > 2 else ()
    counted = step.layers[len(before) : -1] or step.layers
    begin = sum(before) + of_attention * len(before)
    end = begin + sum(counted) + of_attention * len(counted)
    return ([*at, len(step.launches)][end] - at[begin]) / len(counted)


def _short(one: Instruction) -> str:
    return f"{one.name} {list(one.dims or ())}"
