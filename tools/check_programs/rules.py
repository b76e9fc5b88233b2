"""What must hold of a compiled step. Each rule gives what it found and the limit.

Two of them are asked only where attention is a kernel: XLA's own path gathers pages in loops, of many small kernels,
and no command buffer holds a loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tools.check_programs.hlo import Instruction, Launch, Module

GEMMS = 4  # a layer: queries, keys and values; output; gate and up; down
KERNELS_PER_LAYER = 16  # and the sums over devices
_PLANNED_WITHIN = 0.02
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
_IN_PLACE = {"scatter", "dynamic-update-slice"}


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled program and what is known of its arguments.

    Attributes:
        weights: how many of the first arguments are parameters of the model.
        pool: elements of one layer's pool.
        tokens: that one call computes.
        widest: numbers of the widest activation of a token.
        layers, head: layers whose GEMMs are all needed, and GEMMs besides.
        donated, aliased: bytes of donated arguments, and how many of them results take over.
        temporaries: bytes that it needs while it runs, and the most that it may.
        arguments, planned: bytes of all arguments, and what the engine plans with: weights, pool and slots.
        devices: over which the tensor axis spreads it; all numbers are those of one.
    """

    name: str
    module: Module
    launches: list[Launch]
    weights: int
    pool: int
    tokens: int
    widest: int
    layers: int
    head: int
    donated: int
    aliased: int
    temporaries: int
    ceiling: int
    arguments: int
    planned: int
    devices: int = 1


@dataclasses.dataclass(frozen=True)
class Finding:
    """One rule of one program. ``asked``: false where attention takes XLA's path, and the rule is about kernels."""

    rule: str
    found: str
    limit: str
    holds: bool
    asked: bool = True

    @property
    def broken(self) -> bool:
        return self.asked and not self.holds


def findings(step: Step) -> Iterator[Finding]:
    gemms, expected = len(weight_gemms(step)), GEMMS * step.layers + step.head
    yield Finding("GEMMs with a weight", str(gemms), str(expected), gemms == expected)
    moved = moved_arrays(step)
    shown = "none" if not moved else f"{len(moved)}: {', '.join(_short(one) for one in moved[:3])}"
    yield Finding("pools or weights copied, converted, cut", shown, "none", not moved)
    yield Finding("donated bytes updated in place", str(step.aliased), str(step.donated), step.aliased == step.donated)
    mib = [f"{size / 2**20:.0f} MiB" for size in (step.temporaries, step.ceiling)]
    yield Finding("temporaries", *mib, step.temporaries <= step.ceiling)
    sums, gathers = (collectives(step, kind) for kind in ("all-reduce", "all-gather"))
    # Two sums a layer, those of the last one only where its result is needed, and the embedding's; the logits.
    many = step.devices > 1
    wanted = [(2 * step.layers + 1) * many, (step.name != "prefill") * many]
    found = sum(collectives(step, kind) for kind in _COLLECTIVES)
    yield Finding("all-reduces", str(sums), str(wanted[0]), sums == wanted[0])
    yield Finding("all-gathers", str(gathers), str(wanted[1]), gathers == wanted[1])
    yield Finding("other collectives", str(found - sums - gathers), "0", found == sums + gathers)
    # A prompt's chunk takes no head, and little of the last layer.
    least = 0 if step.name == "prefill" else (1 - _PLANNED_WITHIN) * step.planned
    near = least <= step.arguments <= (1 + _PLANNED_WITHIN) * step.planned
    yield Finding("bytes of arguments, as planned", str(step.arguments), str(step.planned), near)
    asked = not any(one.opcode == "while" for one in step.module.computations[step.module.entry])
    count, most = kernels_per_layer(step), KERNELS_PER_LAYER + 2 * many
    yield Finding("kernels a layer", f"{count:.1f}", str(most), count <= most, asked)
    buffers = {launch.buffer for launch in step.launches if launch.is_gemm}
    within = buffers != {None} and len(buffers) == 1
    # XLA's default leaves collectives out of command buffers.
    yield Finding("command buffers with GEMMs", str(len(buffers)), "1", within, asked and not many)


def weight_gemms(step: Step) -> list[Instruction]:
    """GEMMs of the entry computation that read a parameter of the model: attention's own have none."""
    weights = {one.name for position, one in step.module.parameters().items() if position < step.weights}
    entry = step.module.computations[step.module.entry]
    return [one for one in entry if one.is_gemm and weights & {step.module.source(name) for name in one.operands}]


def moved_arrays(step: Step) -> list[Instruction]:
    """Results in memory as large as a pool or a weight, or larger than any activation, that are not written in place.

    A GEMM's result is an activation. A custom call that is aliased writes in place, as do scatters.
    """
    parameters = step.module.parameters()
    sizes = {parameters[position].size for position in range(step.weights) if len(parameters[position].dims or ()) > 1}
    return [one for one in step.module.in_memory() if _is_moved(step, one, {*sizes, step.pool})]


def _is_moved(step: Step, one: Instruction, sizes: set[int]) -> bool:
    if one.opcode in _VIEWS or one.opcode in _IN_PLACE or one.is_gemm:
        return False
    opcode = step.module.root_opcode(one) if one.opcode == "fusion" else one.opcode
    if opcode in _IN_PLACE or (one.opcode == "custom-call" and "output_to_operand_aliasing" in one.line):
        return False
    if one.size in sizes and one.size > step.tokens * step.widest:
        return True
    large = one.size >= min(sizes)
    return large and (one.size > step.tokens * step.widest or (opcode in _MOVES and one.size in sizes))


def collectives(step: Step, kind: str) -> int:
    """Exchanges among devices, each counted once whether or not it has an end of its own."""
    return sum(one.opcode in (kind, f"{kind}-start") for body in step.module.computations.values() for one in body)


def kernels_per_layer(step: Step) -> float:
    """Launches from the first layer's first GEMM to the last layer's first, a layer; those of loops counted once."""
    at = [index for index, launch in enumerate(step.launches) if launch.is_gemm]
    per_layer = (len(at) - step.head) // step.layers
    last = at[per_layer * (step.layers - 1)]
    return (last - at[0]) / (step.layers - 1)


def _short(one: Instruction) -> str:
    return f"{one.name} {list(one.dims or ())}"
