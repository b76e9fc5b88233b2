"""Whole deployments on absent H100s: the configurations to compile, and the table of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tools.check_programs.work import Part, Work

# Pools that fill the share of 80 GB that `EngineConfig.memory_utilization` allows, as a start without `num_pages`
# would: the planner's sum with the largest programs is within 72 GB.
TOPOLOGIES: Mapping[str, Work] = {
    str(work): work
    for work in (
        Work("Llama-3.1-8B", pages=6500),
        Work("Llama-3.1-70B", pages=6800, tensor=4),
        Work("Llama-3.1-70B", pages=20000, tensor=8),
        Work("Llama-3.1-405B", pages=9800, tensor=8, stages=2),
        Work("Mixtral-8x7B", pages=22500, expert=4),
        Work("Mixtral-8x7B", pages=56000, expert=4, tensor=2),
        Work("DeepSeek-V2", pages=2500, expert=8),
        Work("Llama-4-Scout", pages=5200, expert=4),
        Work("MiniMax-M2", pages=6500, expert=8),
        Work("Qwen2.5-VL-72B", pages=19500, tensor=8),
        Work("Qwen3-VL-30B-A3B", pages=34000, expert=4),
    )
}

_COLUMNS = (
    "deployment",
    "H100s",
    "weights",
    "pool",
    "planned",
    "compiled",
    "temporaries",
    "sums, gathers: decode",
    "kernels a layer: decode, prefill",
    "compiled in",
)


def header() -> str:
    """Format the head of a Markdown table with a line per pipeline stage. Bytes are per device, in GB of 10^9."""
    return f"{row(_COLUMNS)}\n{row(['---'] * len(_COLUMNS))}"


def lines(work: Work, parts: Sequence[Part]) -> str:
    """Format the table's lines of a deployment."""
    return "\n".join(row(_line(work, part)) for part in parts)


def row(cells: Sequence[str]) -> str:
    """Format a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _line(work: Work, part: Part) -> tuple[str, ...]:
    decode, prefill = part.programs["decode"], part.programs["prefill"]
    sizes = (part.weights, part.pool, part.planned, part.compiled, part.temporaries)
    return (
        str(work) if work.stages == 1 else f"{work}, stage {part.number + 1}",
        str(work.devices // work.stages),
        *(f"{size / 1e9:.2f}" for size in sizes),
        f"{decode.sums}, {decode.gathers}",
        f"{decode.kernels:.0f}, {prefill.kernels:.0f}",
        f"{part.seconds:.0f} s",
    )


def broken(work: Work, parts: Sequence[Part]) -> Iterator[str]:
    """Yield a line for each broken rule."""
    for part in parts:
        places = [("", part.findings), *((name, program.findings) for name, program in part.programs.items())]
        for place, findings in places:
            where = ", ".join(filter(None, [str(work), f"stage {part.number + 1}", place]))
            yield from (f"{where}: {one.rule}: {one.found} of {one.limit}" for one in findings if one.broken)
