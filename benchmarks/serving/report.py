"""Report of a run's figures: goals, verdicts, and the lines that are printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FRONT_GOAL = 60e-6  # seconds of the front end per token
DELIVERY_GOAL = 10e-3  # p99, from the engine to the client
REJECTION_GOAL = 10e-3  # p99, from the request to the rejection
BURST_GOAL = 50e-3  # the same at ten times the load, and for bursts
TTFT_GOAL = 1.5  # p99 of the accepted requests, over the queue's bound
OTHERS_MAY_USE = 0.05  # share of the machine, while figures are taken

Run = Mapping[str, Any]


def verdicts(runs: Mapping[str, Run]) -> dict[str, dict[str, Any]]:
    """Return the verdicts on the goals of these runs. Delivery goals apply to tokens that come evenly."""
    found: dict[str, tuple[float, float]] = {}
    for name, run in runs.items():
        found[f"{name}: errors"] = len(run["errors"]), 0
        if "rejection" in run:
            goal = REJECTION_GOAL if run["load"]["factor"] <= 2 else BURST_GOAL
            found[f"{name}: rejection p99, ms"] = run["rejection"]["p99"] * 1e3, goal * 1e3
            found[f"{name}: TTFT p99 over the bound"] = run["ttft"]["p99"] / run["queue_bound"], TTFT_GOAL
        elif "refusal" in run:
            goal = REJECTION_GOAL if run["load"]["at_once"] == 1 else BURST_GOAL
            found[f"{name}: refusal p99, ms"] = run["refusal"]["p99"] * 1e3, goal * 1e3
        else:
            found[f"{name}: front end, us a token"] = run["cpu_per_token"]["front"] * 1e6, FRONT_GOAL * 1e6
            if run["load"]["groups"] > 1:
                found[f"{name}: delivery p99, ms"] = run["delivery"]["p99"] * 1e3, DELIVERY_GOAL * 1e3
    return {name: {"figure": a, "goal": b, "reached": a <= b} for name, (a, b) in found.items()}


def doubts(runs: Mapping[str, Run]) -> list[str]:
    """Return the reasons to doubt the figures."""
    return [
        f"NOT QUIET: other programs used {run['used_by_others']:.0%} of the machine during {name}"
        for name, run in runs.items()
        if run["used_by_others"] > OTHERS_MAY_USE
    ]


def table(runs: Mapping[str, Run]) -> str:
    """Format Markdown: a line for each delivery run, then each overload run, then each full-queue run."""
    delivery = [_delivery(name, run) for name, run in runs.items() if "delivery" in run]
    overload = [_overload(name, run) for name, run in runs.items() if "rejection" in run]
    heads = ["run", "tokens/s", "front us", "engine us", "client us", "median ms", "p99 ms", "max ms"]
    lines = _rows(heads, delivery)
    heads = ["run", "requests", "refused", "refusal median ms", "p99 ms", "TTFT p99 ms", "bound ms"]
    lines += ["", *_rows(heads, overload)]
    refusals = [_refusals(name, run) for name, run in runs.items() if "refusal" in run]
    heads = ["run", "at once", "front us a refusal", "engine us", "client us", "median ms", "p99 ms", "max ms"]
    return "\n".join([*lines, "", *_rows(heads, refusals)])


def _rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    return ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows)]


def _delivery(name: str, run: Run) -> list[str]:
    cpu, late = run["cpu_per_token"], run["delivery"]
    costs = [f"{cpu[process] * 1e6:.1f}" for process in ("front", "engine", "client")]
    return [name, f"{run['tokens_per_second']:.0f}", *costs, *(_ms(late[key]) for key in ("median", "p99", "max"))]


def _overload(name: str, run: Run) -> list[str]:
    refusal = [_ms(run["rejection"][key]) for key in ("median", "p99")]
    waited = [_ms(run["ttft"]["p99"]), _ms(run["queue_bound"])]
    return [name, str(run["requests"]), str(run["refused"]), *refusal, *waited]


def _refusals(name: str, run: Run) -> list[str]:
    costs = [f"{run['cpu_per_refusal'][process] * 1e6:.0f}" for process in ("front", "engine", "client")]
    return [name, str(run["load"]["at_once"]), *costs, *(_ms(run["refusal"][key]) for key in ("median", "p99", "max"))]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def summary(result: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: {item['figure']:.3g}, goal at most {item['goal']:g}: {'reached' if item['reached'] else 'MISSED'}"
        for name, item in result["verdicts"].items()
    ]
