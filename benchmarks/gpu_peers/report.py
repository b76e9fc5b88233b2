"""Medians, ratios and goals of a record; as a table and as a picture."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.goals import Goal

# Goals of jaxinfer's throughput as a share of another engine's, in every load.
GOALS = {"vllm": Goal(1.0, 0.9), "jaxinfer-relaxed": Goal(0.9)}
_FIGURES = ("output_tokens_per_second", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99")
METHOD = {
    "rounds": "engines start in turn, every other round in reverse, each in a process of its own; medians count",
    "start": "seconds from the process's start until it takes requests: cold is the first, warm the median of others",
    "ttft": "from when a request was due to its first token; p50 and p99 over a load's requests",
    "tpot": "from the first to the last token of a request, over the tokens after the first",
    "arrivals": "@SHARE: a Poisson process, SHARE times as fast as the slowest engine serves what comes all at once",
    "ratio": "jaxinfer's output tokens a second over the other's in the same round; the median counts",
    "memory": "MiB of the device in use behind the last load, everybody's",
}


def summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return medians of each engine by load, ratios to jaxinfer with their goals, and start times in seconds."""
    loads = list(dict.fromkeys(load for start in record["starts"] for load in start["loads"]))
    engines = list(dict.fromkeys(start["engine"] for start in record["starts"]))
    rows = [
        {"load": load, "engine": engine, **found}
        for load in loads
        for engine in engines
        if (found := _medians(_of(record, engine, load))) is not None
    ]
    ratios = [
        ratio
        for load in loads
        for engine in engines
        if engine != "jaxinfer" and (ratio := _ratio(record, engine, load)) is not None
    ]
    return {"rows": rows, "ratios": ratios, "starts": {engine: _starts(record, engine) for engine in engines}}


def _of(record: Mapping[str, Any], engine: str, load: str) -> dict[int, Mapping[str, float]]:
    """Return the figures of a load by round."""
    return {
        start["round"]: start["loads"][load]
        for start in record["starts"]
        if start["engine"] == engine and load in start["loads"]
    }


def _medians(rounds: Mapping[int, Mapping[str, float]]) -> dict[str, float] | None:
    if not rounds:
        return None
    names = [name for name in _FIGURES if name in next(iter(rounds.values()))]
    return {name: statistics.median(figures[name] for figures in rounds.values()) for name in names}


def _ratio(record: Mapping[str, Any], engine: str, load: str) -> dict[str, Any] | None:
    ours, theirs = (_of(record, name, load) for name in ("jaxinfer", engine))
    name = "output_tokens_per_second"
    found = [ours[number][name] / theirs[number][name] for number in ours.keys() & theirs.keys()]
    if not found:
        return None
    ratio = statistics.median(found)
    goal = GOALS.get(engine)
    verdict = {} if goal is None else {"goal": goal.goal, "floor": goal.floor, "verdict": goal.verdict(ratio)}
    return {"load": load, "engine": engine, "ratio": ratio, "low": min(found), "high": max(found), **verdict}


def _starts(record: Mapping[str, Any], engine: str) -> dict[str, Any]:
    found = [start for start in record["starts"] if start["engine"] == engine]
    seconds = [start["seconds_to_ready"] for start in found]
    memory = [start["device_mib"] for start in found if start.get("device_mib") is not None]
    warm = statistics.median(seconds[1:]) if len(seconds) > 1 else None
    return {"cold": seconds[0], "warm": warm, "device_mib": max(memory, default=None)}


def table(record: Mapping[str, Any]) -> str:
    """Format the record as lines of Markdown, with the engines and loads that are missing."""
    found = summary(record)
    ratios = {(each["load"], each["engine"]): each for each in found["ratios"]}
    lines = [
        f"{record['device']['name']}, {record['date'][:10]}",
        "",
        "| load | engine | tokens/s | TTFT p50 / p99 ms | TPOT p50 / p99 ms | jaxinfer is |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        lines.append(_line(row, ratios.get((row["load"], row["engine"]))))
    lines += ["", "| engine | start cold s | warm s | device MiB |", "|---|---|---|---|"]
    for engine, start in found["starts"].items():
        lines.append(f"| {engine} | {_text(start['cold'])} | {_text(start['warm'])} | {_text(start['device_mib'])} |")
    lines += _agreement(record["check"])
    lines += [f"absent: {engine}: {why}" for engine, why in record["absent"].items()]
    lines += [f"skipped: {what}" for what in record["skipped"]]
    if not record["device"]["gpu"]:
        lines.append("not a GPU: only that it runs was checked")
    return "\n".join(lines)


def _agreement(check: Mapping[str, Sequence[int]]) -> list[str]:
    """Report how many greedy tokens of a checkpoint match jaxinfer's. In 16 bits, engines may differ by rounding."""
    ours = check.get("jaxinfer", ())
    return [
        f"same greedy tokens as jaxinfer: {engine}: {_common(ours, tokens)} of {len(ours)}"
        for engine, tokens in check.items()
        if engine != "jaxinfer"
    ]


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )


def _line(row: Mapping[str, Any], ratio: Mapping[str, Any] | None) -> str:
    tpot = f"{_text(row.get('tpot_ms_p50'))} / {_text(row.get('tpot_ms_p99'))}"
    beside = "" if ratio is None else f"{ratio['ratio']:.2f} {ratio.get('verdict', '')}".strip()
    ttft = f"{row['ttft_ms_p50']:.1f} / {row['ttft_ms_p99']:.1f}"
    return f"| {row['load']} | {row['engine']} | {row['output_tokens_per_second']:.0f} | {ttft} | {tpot} | {beside} |"


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def below_floor(record: Mapping[str, Any]) -> list[str]:
    """Describe the ratios that are below their floor; empty without a GPU."""
    if not record["device"]["gpu"]:
        return []
    found = [each for each in summary(record)["ratios"] if each.get("verdict") == "below floor"]
    return [f"{each['load']}: {each['ratio']:.2f} of {each['engine']}, floor {each['floor']}" for each in found]


def draw(record: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw tokens a second, TTFT and TPOT of each engine by load.

    Raises:
        ImportError: matplotlib is missing, as on many GPU machines.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = summary(record)["rows"]
    figure = Figure(figsize=(9, 10), layout="constrained")
    FigureCanvasAgg(figure)
    panels = {"output_tokens_per_second": "tokens/s", "ttft_ms_p50": "TTFT p50, ms", "tpot_ms_p50": "TPOT p50, ms"}
    for axis, (name, label) in zip(figure.subplots(3, 1), panels.items(), strict=True):
        _bars(axis, rows, name)
        axis.set_ylabel(label)
    title = f"{record['device']['name']}, {record['date'][:10]}"
    figure.suptitle(title if record["device"]["gpu"] else f"{title}: not a GPU, only that it runs was checked")
    figure.savefig(path, dpi=120, format="png")


def _bars(axis: Any, rows: Sequence[Mapping[str, Any]], name: str) -> None:
    loads = list(dict.fromkeys(row["load"] for row in rows))
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    width = 0.8 / len(engines)
    for at, engine in enumerate(engines):
        found = {row["load"]: row[name] for row in rows if row["engine"] == engine and name in row}
        places = [loads.index(load) + (at - (len(engines) - 1) / 2) * width for load in found]
        axis.bar(places, list(found.values()), width, label=engine)
    axis.set_xticks(range(len(loads)), loads)
    axis.set_yscale("log")
    axis.legend()
