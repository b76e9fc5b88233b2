"""Rows of figures: as records for a JSON file, and as a Markdown table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.goals import goal_for
from benchmarks.peers.measure import Agreement, Spread, ratios
from benchmarks.peers.session import Cell, Phase, Samples, Taken
from benchmarks.peers.work import Work

METHOD = {
    "prefill": "a call for one new token: prompt tokens of all sequences / time until each had its first token",
    "decode": "tokens that came while all sequences decoded (after the last one's first token, up to the first one's "
    "last) / the time between",
    "ratio": "jaxinfer's rate / the peer's, round by round; the median counts",
    "limit": "decode: bytes of weights, keys and values per step, times steps/s, over the measured read bandwidth; "
    "prefill: operations/s over the measured rate of a large matrix product in the same dtype; both are measured "
    "before and after each cell, and the better one counts",
    "noise": "a row is noisy if other programs used more than 3 % of the machine during its cell, or if the rates of a "
    "peer differ by more than a quarter of their median between rounds",
    "fairness": "same weights, prompts, dtype (keys and values too), cores; peers take turns; idle peers are stopped",
}

_ME = "jaxinfer"
_OTHERS_MAY_USE = 0.03  # share of the machine, while figures are taken
_MOST_SPREAD = 0.25  # of the rates of a peer, relative to their median


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of the machine in one dtype: bytes/s read from memory, flop/s of a matrix product."""

    bandwidth: float
    gemm: float

    @classmethod
    def best(cls, each: Sequence[Limits]) -> Limits | None:
        return cls(max(one.bandwidth for one in each), max(one.gemm for one in each)) if each else None


def row(cell: Cell, taken: Taken, limits: Limits | None, used: float) -> dict[str, Any]:
    """Return the record of one phase of one cell. ``used``: share of the machine that other programs used."""
    phase, samples, work = taken.phase, taken.samples, Work.of(cell.folder)
    mine = samples[_ME]
    others = {name: found for name, found in samples.items() if name != _ME}
    return {
        "model": cell.model,
        "dtype": cell.dtype,
        "batch": cell.batch,
        "settings": "default" if cell.default else "batch",
        "phase": phase.name,
        "prompt_len": phase.prompt_len,
        "new_tokens": phase.new_tokens,
        "tokens_per_second": {name: _spread(Spread.of(found.rates)) for name, found in samples.items()},
        "rounds": {name: found.rates for name, found in samples.items()},
        "call_seconds": {name: found.seconds for name, found in samples.items()},
        "of_limit": {name: _of_limit(cell, phase, found, work, limits) for name, found in samples.items()},
        "ratio": {name: _against(name, cell, phase, mine, found) for name, found in others.items()},
        "same_tokens": {
            name: dataclasses.asdict(Agreement.of(mine.tokens, found.tokens)) for name, found in others.items()
        },
        "limits": None if limits is None else dataclasses.asdict(limits),
        "noise": _noise(samples, used),
        "absent": taken.absent,
    }


def _noise(samples: Mapping[str, Samples], used: float) -> str | None:
    """Return why the figures of a row are doubtful, None if they are not."""
    if used > _OTHERS_MAY_USE:
        return f"others used {used:.0%}"
    for name, found in samples.items():
        spread = Spread.of(found.rates)
        if spread.high - spread.low > _MOST_SPREAD * spread.median:
            return f"{name} from {spread.low:.4g} to {spread.high:.4g}"
    return None


def _spread(spread: Spread) -> dict[str, float]:
    return {"median": spread.median, "min": spread.low, "max": spread.high}


def _of_limit(cell: Cell, phase: Phase, samples: Samples, work: Work, limits: Limits | None) -> float | None:
    if limits is None:
        return None
    rate = Spread.of(samples.rates).median
    if phase.name == "prefill":
        calls = rate / (cell.batch * phase.prompt_len)
        return calls * work.prefill_flops(cell.batch, phase.prompt_len) / limits.gemm
    context = phase.prompt_len + phase.new_tokens / 2  # mean over the run
    return rate / cell.batch * work.decode_bytes(cell.batch, context, cell.dtype) / limits.bandwidth


def _against(name: str, cell: Cell, phase: Phase, mine: Samples, theirs: Samples) -> dict[str, Any]:
    batch = None if cell.default else cell.batch
    spread, goal = ratios(mine.rates, theirs.rates), goal_for(name, phase.name, cell.dtype, batch, phase.prompt_len)
    if goal is None:
        return _spread(spread) | {"goal": None, "floor": None, "verdict": None}
    return _spread(spread) | dataclasses.asdict(goal) | {"verdict": goal.verdict(spread.median)}


def table(rows: Sequence[Mapping[str, Any]], peers: Sequence[str]) -> str:
    """Format a Markdown table: a line for each row, tokens/s as median (lowest to highest)."""
    others = [peer for peer in peers if peer != _ME]
    heads = ["model", "dtype", "batch", "phase", _ME, "of limit"]
    for peer in others:
        heads += [peer, "of limit", "ratio", "goal", "verdict", "same tokens"]
    heads.append("noise")
    lines = [heads, ["---"] * len(heads), *(_line(item, others) for item in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _line(item: Mapping[str, Any], others: Sequence[str]) -> list[str]:
    phase = f"{item['phase']} {item['prompt_len']}" + (f"+{item['new_tokens']}" if item["phase"] == "decode" else "")
    batch = "default" if item["settings"] == "default" else str(item["batch"])
    cells = [item["model"], item["dtype"], batch, phase, *_rate(item, _ME)]
    for peer in others:
        cells += _versus(item, peer) if peer in item["ratio"] else ["absent", *[""] * 5]
    return [*cells, item["noise"] or ""]


def _rate(item: Mapping[str, Any], peer: str) -> list[str]:
    rate, share = item["tokens_per_second"][peer], item["of_limit"][peer]
    return [
        f"{rate['median']:.4g} ({rate['min']:.4g} to {rate['max']:.4g})",
        "" if share is None else f"{share:.0%}",
    ]


def _versus(item: Mapping[str, Any], peer: str) -> list[str]:
    ratio, same = item["ratio"][peer], item["same_tokens"][peer]
    bounds = [f"{ratio[key]:g}" for key in ("goal", "floor") if ratio[key] is not None]
    return [
        *_rate(item, peer),
        f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
        " / ".join(bounds),
        ratio["verdict"] or "",
        f"{same['equal']}/{same['sequences']}",
    ]


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Summarise the comparisons: their number, and each that misses its floor or its goal."""
    compared = [(item, peer, ratio) for item in rows for peer, ratio in item["ratio"].items() if ratio["verdict"]]
    lines = [
        f"{ratio['verdict'].upper()}: {item['model']} {item['dtype']} {_cell(item)} {item['phase']}: "
        f"{ratio['median']:.2f}x {peer}, goal {ratio['goal']:g}"
        + (f", floor {ratio['floor']:g}" if ratio["floor"] is not None else "")
        for item, peer, ratio in compared
        if ratio["verdict"] != "goal"
    ]
    if not compared:
        return "no goal applies to these rows"
    return "\n".join([f"{len(compared) - len(lines)} of {len(compared)} comparisons reach their goal", *lines])


def _cell(item: Mapping[str, Any]) -> str:
    return f"default {item['prompt_len']}" if item["settings"] == "default" else f"batch {item['batch']}"
