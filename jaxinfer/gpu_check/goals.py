"""What a figure of an H100 is to be: a goal, and a floor below which the check fails. Figures of other GPUs have none.

Where kernels move bytes it is a share of what a copy reaches on the same device on the same day, elsewhere TFLOP/s or
milliseconds. What is compared with another section is a ratio of two records.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxinfer.gpu_check import workloads

DEVICE = "H100"


class Goal(NamedTuple):
    """Of one figure of one record: at least ``goal``, or at most where ``most``; None: no floor.

    Attributes:
        field: of the record.
        over: section whose record of the same key the figure is divided by.
        beside: key of a record of the same section that the figure is divided by.
    """

    section: str
    key: str
    field: str
    goal: float
    floor: float | None = None
    most: bool = False
    over: str | None = None
    beside: str | None = None

    def reached(self, figure: float, bound: float) -> bool:
        return (operator.le if self.most else operator.ge)(figure, bound)


class Verdict(NamedTuple):
    """A figure beside its goal: "goal", "floor" (the floor holds, the goal does not), "below goal" or "below floor"."""

    goal: Goal
    figure: float
    word: str

    def __str__(self) -> str:
        most = "at most" if self.goal.most else "at least"
        floor = "" if self.goal.floor is None else f", floor {self.goal.floor:g}"
        other = self.goal.over or self.goal.beside
        over = "" if other is None else f" over {other}'s"
        return (
            f"{self.goal.section}, {self.goal.key}: {self.goal.field}{over} {self.figure:.4g}, {most} "
            f"{self.goal.goal:g}{floor}: {self.word}"
        )


def _decode(rows: int, context: int, share: float, floor: float) -> Goal:
    return Goal("kernels", f"decode, {rows} rows, {context} keys, page 64: mosaic", "share_of_copy", share, floor)


def _step(rows: int, context: int, share: float, floor: float | None) -> Goal:
    return Goal("step", f"decode, {rows} rows, auto, context {context}", "share_of_copy", share, floor)


def _few_rows(shape: workloads.Workload, share: float = 0.97) -> Goal:
    return Goal("kernels", f"{shape}: mosaic", "share_of_copy", share)


def _many_rows(shape: workloads.Dense) -> Goal:
    """Beside cuBLAS."""
    return Goal("kernels", f"{shape}: mosaic", "tflop_s", 0.95, beside=f"{shape}: xla")


GOALS: tuple[Goal, ...] = (
    # Floors of kernels: what was measured on 2026-11-22, less 3 %.
    _decode(64, 4096, 0.97, 0.87),
    _decode(8, 4096, 0.88, 0.69),
    Goal("kernels", "decode, 1 rows, 4096 keys, page 64: mosaic", "best_ms", 0.013, 0.0191, most=True),
    Goal("kernels", "prefill, 1 x 8192 of 8192 tokens, page 64: mosaic", "tflop_s", 680, 577),
    Goal("kernels", "prefill, 4 x 2048 of 2048 tokens, page 64: mosaic", "tflop_s", 540, 442),
    *map(_few_rows, workloads.FEW_ROWS),
    *map(_many_rows, workloads.MANY_ROWS),
    # Never measured: of weights in registers MARLIN has nine tenths of the ideal (Frantar et al. 2024, figure 1).
    _few_rows(workloads.STORED, 0.90),
    _few_rows(workloads.EXPERTS, 0.90),
    _few_rows(workloads.FLOAT4, 0.80),
    _few_rows(workloads.LATENTS, 0.75),
    Goal(*("kernels", f"{workloads.PREFILLED}: mosaic", "tflop_s", 0.8), beside=f"{workloads.MANY_ROWS[0]}: xla"),
    _step(1, 512, 0.80, 0.72),
    _step(8, 512, 0.80, 0.72),
    _step(64, 512, 0.80, 0.72),
    _step(64, 4096, 0.80, 0.72),
    _step(256, 512, 0.82, None),
    _step(256, 1536, 0.82, None),
    # 8 MiB at the 50 GB/s of the link are 0.17 ms.
    Goal("step", "swap, 4 pages a call", "page_out_ms", 0.3, most=True),
    Goal("step", "swap, 4 pages a call", "page_in_ms", 0.3, most=True),
    Goal("engine", "256 requests, 1024 + 256 tokens", "output_tokens_s", 0.9, over="relaxed"),
    Goal("engine", "64 requests, 512 + 256 tokens", "output_tokens_s", 0.9, over="relaxed"),
    *(Goal("server", f"{count} requests, 512 + 256 tokens", "of_engine", 0.95) for count in (1, 8, 64, 256)),
)


def verdicts(sections: Mapping[str, Any], device: str) -> list[Verdict]:
    """Every goal whose figure is there."""
    return list(_verdicts(sections)) if DEVICE in device else []


def _verdicts(sections: Mapping[str, Any]) -> Iterator[Verdict]:
    for goal in GOALS:
        figure = _figure(sections, goal.section, goal.key, goal.field)
        if figure is None:
            continue
        if goal.over is not None or goal.beside is not None:
            other = _figure(sections, goal.over or goal.section, goal.beside or goal.key, goal.field)
            if not other:
                continue
            figure /= other
        yield Verdict(goal, figure, _word(goal, figure))


def _word(goal: Goal, figure: float) -> str:
    if goal.reached(figure, goal.goal):
        return "goal"
    if goal.floor is None:
        return "below goal"
    return "floor" if goal.reached(figure, goal.floor) else "below floor"


def _figure(sections: Mapping[str, Any], section: str, key: str, field: str) -> float | None:
    records: Sequence[Mapping[str, Any]] = sections.get(section, {}).get("records", ())
    found: float | None = next((record.get(field) for record in records if record["key"] == key), None)
    return found
