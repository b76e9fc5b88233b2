"""Goals of figures, and floors below which the check fails.

Where kernels are bound by memory bandwidth, a goal is a share of the copy bandwidth of the same device on the same day;
a comparison with another section is a ratio of two records. Both apply to every GPU. Times, and rates that follow from
the tensor cores, are goals of the devices that they name: an H100 (SXM) and an H200 have equal tensor cores and
different memory bandwidths.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pallas_kernels import rates

# Longest context of 256 rows of the 8B step that fits into memory, see section step.
LONGEST_OF_256 = {rates.H100: 1536, rates.H200: 3072}
_PROMPTS = (512, 1024)
_HOPPERS = (rates.H100, rates.H200)  # equal tensor cores, and equal links to the host


class Goal(NamedTuple):
    """A goal for one figure of one record: at least ``goal``, or at most if ``most``; a ``floor`` of None: no floor.

    Attributes:
        field: field of the record.
        over: section whose record with the same key is the divisor of the figure.
        beside: key of a record of the same section that is the divisor of the figure.
        devices: JAX's names of the devices that the goal applies to; empty: all.
    """

    section: str
    key: str
    field: str
    goal: float
    floor: float | None = None
    most: bool = False
    over: str | None = None
    beside: str | None = None
    devices: tuple[str, ...] = ()

    def reached(self, figure: float, bound: float) -> bool:
        return (operator.le if self.most else operator.ge)(figure, bound)


class Verdict(NamedTuple):
    """A figure and its verdict: "goal", "floor" (the floor is met, the goal is not), "below goal" or "below floor"."""

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


def _few_rows(shape: str, share: float = 0.97) -> Goal:
    return Goal("kernels", f"{shape}: mosaic", "share_of_copy", share)


def _many_rows(shape: str) -> Goal:
    """Return the goal of a shape with many rows, as a share of cuBLAS."""
    return Goal("kernels", f"{shape}: mosaic", "tflop_s", 0.95, beside=f"{shape}: xla")


def _prefill(sequences: int, tokens: int, goal: float, floor: float) -> Goal:
    key = f"prefill, {sequences} x {tokens} of {tokens} tokens, page 64: mosaic"
    return Goal("kernels", key, "tflop_s", goal, floor, devices=_HOPPERS)


def _one_row(device: str, goal: float, floor: float | None = None) -> Goal:
    """Return a goal for attention of one row, in milliseconds: launch and latencies bound it, not bytes."""
    key = "decode, 1 rows, 4096 keys, page 64: mosaic"
    return Goal("kernels", key, "best_ms", goal, floor, most=True, devices=(device,))


# Names of shapes as in `workloads`, which is not imported here: it imports JAX, and the parent process does without.
_FEW_ROWS = ("64 rows, 14336 x 4096", "64 rows, 4096 x 2 x 14336", "1 rows, 4096 x 6144", "8 rows, 4096 x 128256")
_MANY_ROWS = ("2048 rows, 4096 x 2 x 14336", "2048 rows, 4096 x 6144", "8192 rows, 14336 x 4096")
GOALS: tuple[Goal, ...] = (
    # Floors of kernels are bounds against regressions on an H100.
    _decode(64, 4096, 0.97, 0.87),
    _decode(8, 4096, 0.88, 0.69),
    _one_row(rates.H100, 0.013, 0.0191),
    _one_row(rates.H200, 0.012),
    _prefill(1, 8192, 680, 577),
    _prefill(4, 2048, 540, 442),
    *(_few_rows(f"matmul, {size}") for size in _FEW_ROWS),
    *(_many_rows(f"matmul, {size}") for size in _MANY_ROWS),
    # Not measured yet: with weights in registers, MARLIN reaches 0.9 of the ideal (Frantar et al. 2024, figure 1).
    _few_rows("int4 matmul, 16 rows, 4096 x 28672", 0.90),
    _few_rows("grouped matmul, 64 tokens with 2 of 8 experts, 4096 x 28672", 0.90),
    _few_rows("grouped matmul, 64 tokens with 4 of 32 experts in MXFP4, 2880 x 5760", 0.80),
    _few_rows("MLA decode, 64 rows, 4096 keys, 128 heads, page 64", 0.75),
    Goal(
        *("kernels", "int4 matmul, 2048 rows, 4096 x 28672: mosaic", "tflop_s", 0.8),
        beside=f"matmul, {_MANY_ROWS[0]}: xla",
    ),
    *(_step(rows, 512, 0.80, 0.72) for rows in (2, 8, 64)),
    _step(64, 4096, 0.80, 0.72),
    *(_step(256, context, 0.70, None) for context in (512, *LONGEST_OF_256.values())),
    # 8 MiB take 0.17 ms at the 50 GB/s of the link.
    Goal("step", "swap, 4 pages a call", "page_out_ms", 0.3, most=True, devices=_HOPPERS),
    Goal("step", "swap, 4 pages a call", "page_in_ms", 0.3, most=True, devices=_HOPPERS),
    Goal("engine", "1 requests, 512 + 256 tokens", "output_tokens_s", 150, devices=(rates.H100,)),
    Goal("engine", "1 requests, 512 + 256 tokens", "output_tokens_s", 200, devices=(rates.H200,)),
    # Saturated load: the largest number of requests.
    *(
        Goal("engine", f"256 requests, {prompt} + 256 tokens", "output_tokens_s", 0.95, over="relaxed")
        for prompt in _PROMPTS
    ),
    Goal("engine", "64 requests, 512 + 256 tokens", "output_tokens_s", 0.9, over="relaxed"),
    *(Goal("server", f"{count} requests, 512 + 256 tokens", "of_engine", 0.95) for count in (1, 8, 64, 256)),
)


def has_times(device: str) -> bool:
    """Return whether a device has goals in times."""
    return any(device in goal.devices for goal in GOALS)


def verdicts(sections: Mapping[str, Any], device: str) -> list[Verdict]:
    """Return the verdicts on a device (by JAX's name) for goals with a recorded figure."""
    return list(_verdicts(sections, [goal for goal in GOALS if not goal.devices or device in goal.devices]))


def _verdicts(sections: Mapping[str, Any], goals: Sequence[Goal]) -> Iterator[Verdict]:
    for goal in goals:
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
