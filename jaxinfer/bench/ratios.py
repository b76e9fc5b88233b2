"""Ratios of two sets of figures: of an earlier run, or of another engine."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.table import Table

from jaxinfer.bench.names import OptionsError

FORMAT = 1
_RATES = {
    "requests_per_second": "requests/s",
    "output_tokens_per_second": "output tokens/s",
    "tokens_per_second": "tokens/s, with prompts",
}
_LATENCIES = {"iteration": "iteration", "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
_PERCENTILES = ("mean", "p50", "p90", "p99")
_OF_A_RUN = {"out", "compare", "backend", "backends", "transformers_python", "transformers_batch_size"}
# options that change nothing of what jaxinfer measures


def read(path: pathlib.Path, command: str) -> dict[str, Any]:
    """Return the content of an earlier ``--out`` of the same command.

    Raises:
        OptionsError: it is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise OptionsError(f"--compare {path} cannot be read: {cause}") from cause
    known = isinstance(content, dict) and content.get("format") == FORMAT
    if not known or not isinstance(content.get("backends"), dict) or not isinstance(content.get("settings"), dict):
        raise OptionsError(f"--compare {path} is no file that --out has written")
    if content.get("command") != command:
        raise OptionsError(f"--compare {path} is of jaxinfer bench {content.get('command')}, and this is {command}")
    return content


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what two runs were given differently, one line each."""
    names = sorted((before.keys() | now.keys()) - _OF_A_RUN)
    return [f"{name} {before.get(name)} -> {now.get(name)}" for name in names if before.get(name) != now.get(name)]


def compared(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, float, float, float]]:
    """Yield title, earlier value, present value, and their ratio of each figure that both have: rates a second, and
    latencies in milliseconds."""
    for title, values in _values(now).items():
        earlier = _values(before).get(title)
        if earlier:
            yield title, earlier, values, values / earlier


def _values(figures: Mapping[str, Any]) -> dict[str, float]:
    rates = {title: figures.get(name) for name, title in _RATES.items()}
    latency = figures.get("latency", {})
    times = {
        f"{title} {each}, ms": latency[name][each] * 1e3
        for name, title in _LATENCIES.items()
        if latency.get(name)
        for each in _PERCENTILES
    }
    return {title: value for title, value in {**rates, **times}.items() if value is not None}


def table(title: str, before: Mapping[str, Any], now: Mapping[str, Any], names: tuple[str, str]) -> Table:
    """Return a table of the ratios. ``names``: what the two sets of figures are called."""
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    found.add_column("")
    for name in (*names, f"{names[1]} / {names[0]}"):
        found.add_column(name, justify="right")
    for each, earlier, value, ratio in compared(before, now):
        found.add_row(each, f"{earlier:.2f}", f"{value:.2f}", f"{ratio:.3f}")
    return found
