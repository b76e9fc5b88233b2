"""Throughput against latency, as a picture."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.bench.sweep import Knee


class PlotError(RuntimeError):
    """No picture. The message says why."""


def check() -> None:
    """
    Raises:
        PlotError: matplotlib is not installed. Better before the measurement than after it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("--plot needs matplotlib: pip install 'jaxinfer[bench]'")


def draw(path: pathlib.Path, points: Sequence[Mapping[str, Any]], knee: Knee | None, title: str) -> None:
    """One picture: TTFT and TPOT (p50 and p99) over output tokens a second, and the knee.

    Args:
        points: `figures.summary` of each run, with its ``rate``.
    """
    # matplotlib is optional, and slow to load: only those who draw need it
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    completed = sorted((point for point in points if point["completed"]), key=lambda p: p["rate"] or 0)
    figure = Figure(figsize=(8, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 1, sharex=True)
    for axis, name in zip(axes, ("ttft", "tpot"), strict=True):
        _panel(axis, completed, name)
        _mark(axis, completed, knee)
        axis.legend()
    figure.suptitle(title)
    axes[-1].set_xlabel("output tokens / s")
    figure.savefig(path, dpi=120, format="png")


def _panel(axis: Any, points: Sequence[Mapping[str, Any]], name: str) -> None:
    for percentile in ("p50", "p99"):
        having = [point for point in points if point["latency"][name]]
        rates = [point["output_tokens_per_second"] for point in having]
        axis.plot(rates, [point["latency"][name][percentile] * 1e3 for point in having], "o-", label=percentile)
    for point in points:
        found = point["latency"][name]
        if found and point["rate"] is not None:
            place = (point["output_tokens_per_second"], found["p99"] * 1e3)
            axis.annotate(f"{point['rate']:.3g}/s", place, textcoords="offset points", xytext=(4, 4), fontsize=7)
    axis.set_ylabel(f"{name.upper()}, ms")
    axis.set_yscale("log")
    axis.grid(alpha=0.3)


def _mark(axis: Any, points: Sequence[Mapping[str, Any]], knee: Knee | None) -> None:
    at = [p["output_tokens_per_second"] for p in points if knee is not None and p["rate"] == knee.holds]
    for rate in at:
        axis.axvline(rate, linestyle="--", color="grey", label="knee")
