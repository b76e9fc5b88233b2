"""Plot of latencies and throughput over the offered rate."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.bench.sweep import Knee

Points = Sequence[Mapping[str, Any]]
NARROW = 4.0  # largest ratio of values at which ticks are linear
MARGIN = 1.5  # for latencies: keeps noise from filling the panel if all are nearly equal


class PlotError(RuntimeError):
    """A plot that cannot be drawn. The message gives the reason."""


def check() -> None:
    """Check before the measurement that a plot can be drawn.

    Raises:
        PlotError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("--plot needs matplotlib: pip install 'jaxinfer[bench]'")


def draw(path: pathlib.Path, points: Points, knee: Knee | None, header: Mapping[str, str]) -> None:
    """Draw TTFT and TPOT (p50 and p99) and output tokens per second over the rate, and the knee.

    Args:
        points: `figures.summary` of each run, with its ``rate``; points with ``breaks`` are hollow.
        header: lines above the plot.
    """
    # matplotlib is optional, and slow to import
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = sorted(points, key=offered)
    figure = Figure(figsize=(8, 10), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 1, sharex=True)
    for axis, name in zip(axes, ("ttft", "tpot"), strict=False):
        _latencies(axis, [point for point in points if point["latency"][name]], name)
    _throughput(axes[2], points)
    for axis in axes:
        _finish(axis, knee)
    _ticks(axes[2].xaxis, [offered(point) for point in points])
    axes[2].set_xlabel("offered requests/s (hollow: does not hold)")
    figure.suptitle("\n".join(header.values()), fontsize=9, x=0.02, ha="left")
    figure.savefig(path, dpi=120, format="png")


def offered(point: Mapping[str, Any]) -> float:
    """Return the offered requests per second; for a closed loop or a trace the completed ones."""
    rate = point["rate"]
    return float(point["requests_per_second"] if rate is None or rate == float("inf") else rate)


def _latencies(axis: Any, points: Points, name: str) -> None:
    axis.set_yscale("log")
    values = {each: [1e3 * point["latency"][name][each] for point in points] for each in ("p50", "p99")}
    for percentile, found in values.items():
        _line(axis, points, found, percentile)
    both = [value for found in values.values() for value in found if value > 0]
    if both:
        axis.set_ylim(min(both) / MARGIN, max(both) * MARGIN)
    _ticks(axis.yaxis, both)
    axis.set_ylabel(f"{name.upper()}, ms")


def _throughput(axis: Any, points: Points) -> None:
    axis.set_xscale("log")
    _line(axis, points, [point["output_tokens_per_second"] for point in points], "output")
    axis.set_ylim(bottom=0)
    axis.set_ylabel("output tokens/s")


def _line(axis: Any, points: Points, values: Sequence[float], label: str) -> None:
    """Draw a line through all points; markers are filled where the rate holds."""
    rates = [offered(point) for point in points]
    (line,) = axis.plot(rates, values, "-", label=label)
    colours = ["none" if point.get("breaks") else line.get_color() for point in points]
    axis.scatter(rates, values, facecolors=colours, edgecolors=line.get_color(), zorder=3)


def _finish(axis: Any, knee: Knee | None) -> None:
    if knee is not None and knee.holds is not None and knee.breaks is not None and not knee.doubted:
        axis.axvline(knee.holds, linestyle="--", color="grey", label=f"knee: {knee.holds:.3g}/s")
    axis.grid(alpha=0.3)
    axis.legend()


def _ticks(axis: Any, values: Sequence[float]) -> None:
    """Use plain numbers as tick labels, 600 rather than a power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    narrow = bool(values) and max(values) < NARROW * min(values)
    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]) if narrow else LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def plain(value: float) -> str:
    """Format a number: 0.25, 600, 12,000."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"
