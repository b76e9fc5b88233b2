"""Terminal report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxinfer.bench import speculation
from jaxinfer.bench.sweep import Knee

BOTTLENECK = "the generator was the bottleneck"
MARK = "*"
_LATENCIES = {
    "ttft": "TTFT, from when due",
    "ttft_sent": "TTFT, from when sent",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "E2E, from when due",
    "e2e_sent": "E2E, from when sent",
}


def show_header(console: Console, lines: Mapping[str, str]) -> None:
    """Print the header of a report, before the run."""
    for name, words in lines.items():
        console.print(f"{name:<14}{words}", markup=False, highlight=False)


def show(console: Console, figures: Mapping[str, Any]) -> None:
    """Print one run."""
    console.print(latency_table(figures["latency"], _LATENCIES))
    for line in (*request_lines(figures), *_generator(figures["generator"])):
        console.print(escape(line), highlight=False)
    if doubts := figures["generator"]["doubts"]:
        console.print(f"[bold red]{BOTTLENECK}, and the figures are its own: {'; '.join(doubts)}[/]", highlight=False)


def latency_table(latency: Mapping[str, Any], rows: Mapping[str, str]) -> Table:
    """Return a table of latencies in milliseconds. ``rows``: title of each, by its name in ``latency``."""
    table = Table()
    table.add_column("milliseconds")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    for name, words in rows.items():
        found = latency[name]
        cells = [f"{found[each] * 1e3:.2f}" for each in ("mean", "p50", "p90", "p99", "max")] if found else ["-"] * 5
        table.add_row(words, *cells)
    return table


def request_lines(figures: Mapping[str, Any]) -> list[str]:
    """Return what a report says besides latencies: requests, tokens, users, goodput, drafts, and what was odd."""
    return [
        f"requests      {figures['completed']} of {figures['requests']} in {figures['seconds']:.2f} s: "
        f"{figures['requests_per_second']:.2f}/s, at most {figures['peak_in_flight']} at once",
        f"tokens        {figures['input_tokens']} in ({figures['cached_tokens']} of them cached), "
        f"{figures['output_tokens']} out: {figures['output_tokens_per_second']:.1f} output tokens/s",
        *_users(figures["latency"]["user_tokens_per_second"]),
        *_goodput(figures["goodput"]),
        *speculation.lines(figures["speculation"]),
        *_oddities(figures),
    ]


def _users(found: Mapping[str, float] | None) -> list[str]:
    if not found:
        return []
    words = f"mean {found['mean']:.1f}, p50 {found['p50']:.1f}, 90 % have {found['p90']:.1f}, 99 % {found['p99']:.1f}"
    return [f"each user     {words}, the slowest {found['min']:.1f} tokens/s"]


def _goodput(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return []
    goals = ", ".join(f"{name} {value * 1e3:g} ms" for name, value in found["goals"].items() if value is not None)
    return [f"goodput       {found['requests_per_second']:.2f} requests/s, {found['share']:.1%} within {goals}"]


def _oddities(figures: Mapping[str, Any]) -> list[str]:
    lines = [
        f"failed        {count} x {kind}: {figures['error_examples'][kind]}"
        for kind, count in figures["errors"].items()
    ]
    if figures["other_length"]:
        lines.append(f"other length  {figures['other_length']} outputs are not as long as asked")
    if figures["estimated_counts"]:
        lines.append(f"no usage      {figures['estimated_counts']} outputs were counted by deliveries")
    per = figures["tokens_per_delivery"]
    if per is not None and per > 1.05:
        lines.append(f"deliveries    of {per:.2f} tokens on average: ITL is the time between deliveries")
    return lines


def _generator(found: Mapping[str, Any]) -> list[str]:
    parts = [f"{found['cpu_share']:.0%} of a processor"]
    for name, words in (("lateness", "sends late by p99"), ("loop_lag", "event loop lags by p99")):
        if found[name] is not None:
            parts.append(f"{words} {found[name]['p99'] * 1e3:.2f} ms")
    if found["cpu_seconds_per_delivery"] is not None:
        parts.append(f"{found['cpu_seconds_per_delivery'] * 1e6:.0f} us a delivery")
    return [f"generator     {', '.join(parts)}"]


def show_sweep(console: Console, points: Sequence[Mapping[str, Any]], knee: Knee) -> None:
    """Print all rates of a sweep, and the knee."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    heads = ("rate", "done/s", "tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "keeps up", "good")
    for name in heads:
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("holds", overflow="fold")
    for point in sorted(points, key=lambda each: each["rate"]):
        table.add_row(*_point(point))
    console.print(table)
    for line in (*_marked(points), _knee(knee)):
        console.print(line, markup=False, highlight=False)


def _point(point: Mapping[str, Any]) -> list[str]:
    times = [point["latency"][name] for name in ("ttft", "tpot")]
    cells = [f"{found[each] * 1e3:.1f}" if found else "-" for found in times for each in ("p50", "p99")]
    keeping, good = point["keeping_up"], point["goodput"]
    return [
        f"{point['rate']:.3g}{MARK if point['generator']['doubts'] else ''}",
        f"{point['requests_per_second']:.2f}",
        f"{point['output_tokens_per_second']:.0f}",
        *cells,
        "-" if keeping is None else f"{keeping:.0%}",
        "-" if good is None else f"{good['share']:.0%}",
        "yes" if point["breaks"] is None else f"no: {point['breaks']}",
    ]


def _marked(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Explain the mark once, with the worst rate as example."""
    marked = [point for point in points if point["generator"]["doubts"]]
    if not marked:
        return []
    worst = max(marked, key=lambda point: _lateness(point["generator"]))
    doubts = "; ".join(worst["generator"]["doubts"])
    return [f"{MARK} {BOTTLENECK} at {len(marked)} of {len(points)} rates; at {worst['rate']:.3g}/s {doubts}"]


def _lateness(generator: Mapping[str, Any]) -> float:
    return max((found["p99"] for name in ("lateness", "loop_lag") if (found := generator[name])), default=0.0)


def _knee(knee: Knee) -> str:
    if knee.doubted:
        return "no knee is claimed: where it would be, the figures are the generator's (run it on other cores)"
    if knee.holds is None:
        return f"no rate held, down to {knee.breaks:.3g} requests/s"
    if knee.breaks is None:
        return f"{knee.holds:.3g} requests/s held, and nothing higher was tried: no knee was found"
    return f"the knee: {knee.holds:.3g} requests/s hold, {knee.breaks:.3g} do not"
