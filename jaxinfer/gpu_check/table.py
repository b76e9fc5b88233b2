"""The results as Markdown: one table per section, with the measurements and the limits of the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.gpu_check.goals import has_times, verdicts

NOT_A_GPU = "not a GPU: only that it runs was checked"
_PARITY = ("ok", "worst_vector", "bound", "same_bits_twice", "same_bits_reversed", "same_bits_alone")
_ENGINE = ("output_tokens_s", "all_tokens_s", "step_ms", "share_of_copy", "seconds_to_first_token", "seconds_to_start")
_LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
# Columns of each section besides the key. A record without any of them gets its own line.
COLUMNS: Mapping[str, Sequence[str]] = {
    "copy": ("gb_s", "best_ms"),
    "gemm": ("tflop_s", "best_ms", "relative_error"),
    "parity": _PARITY,
    "parity-all": _PARITY,
    "kernels": ("best_ms", "gb_s", "share_of_copy", "tflop_s", "share_of_gemm"),
    "peers": ("best_ms", "gb_s", "share_of_copy", "tflop_s", "share_of_gemm"),
    "step": (
        "best_ms",
        "tokens_s",
        "share_of_copy",
        "share_of_gemm",
        "kernels_of_mosaic",
        "pool_copies",
        "page_out_ms",
        "page_in_ms",
    ),
    "engine": _ENGINE,
    "relaxed": _ENGINE,
    "formats": _ENGINE,
    "identity": ("ok", "requests", "recompute", "swap"),
    "rows": ("classes", "row_depends_on_slot_at"),
    "agree": ("ok", "same_bits_decoded", "same_bits_as_drafts", "promised"),
    "demo": ("seconds", "tokens", "equal_tokens"),
    "server": ("ok", "output_tokens_s", "of_engine", *_LATENCIES, "seconds_to_ready", "seconds_to_start"),
}
# Figures of a CPU are only in the JSON file, which tests read; in a table they would look like results.
_FIGURES = ("ok", "same_bits", "kernels_of", "pool_copies", "equal_tokens", "classes", "row_depends")


def markdown(content: Mapping[str, Any]) -> str:
    """Write the content of a results file in Markdown."""
    device, on_gpu = content["device"], content["device"]["platform"] != "cpu"
    lines = [f"# {device['kind']}, {content['date']}", ""]
    if not on_gpu:
        lines += [f"**{NOT_A_GPU}.**", ""]
    elif content["quick"]:
        lines += ["Tiny sizes (`--quick`): only that it runs was checked.", ""]
    lines += [f"Commit {content['git'].get('commit')}{' and changes' * bool(content['git'].get('dirty'))}.", ""]
    lines += _sections(content["sections"])
    figures = on_gpu and not content["quick"]
    lines += _goals(content) if figures else []
    lines += _side_by_side(content["sections"]) if figures else []
    for name, section in content["sections"].items():
        if name in COLUMNS:
            lines += _table(name, section["records"], figures=figures)
    return "\n".join(lines).rstrip() + "\n"


def _sections(sections: Mapping[str, Any]) -> list[str]:
    rows = [
        [name, part["status"], str(part["seconds"]), str(sum("error" in each for each in part["records"]))]
        for name, part in sections.items()
    ]
    return [*_grid(["section", "ended", "s", "errors"], rows), ""]


def _goals(content: Mapping[str, Any]) -> list[str]:
    """Return the table of figures and their goals."""
    found = verdicts(content["sections"], content["device"]["kind"])
    head = ["section", "", "figure", "is", "goal", "floor", ""]
    rows = [
        [goal.section, goal.key, goal.field, _cell(figure), _cell(goal.goal), _cell(goal.floor), word]
        for goal, figure, word in found
    ]
    kind = content["device"]["kind"]
    note = [] if has_times(kind) else [f"{no_times(kind)}.", ""]
    return ["## Goals", "", *note, *_grid(head, rows), ""] if rows else []


def no_times(kind: str) -> str:
    """Return the note on a device without goals in times in `goals`."""
    return f"{kind} has no goals in times, only in shares of what it reaches itself"


def _side_by_side(sections: Mapping[str, Any]) -> list[str]:
    """Return the table of milliseconds of every path of a shape: our kernels, XLA and other libraries."""
    times: dict[str, dict[str, float]] = {}
    for name in ("kernels", "peers"):
        for record in sections.get(name, {}).get("records", []):
            if {"best_ms", "shape"} <= record.keys():
                times.setdefault(record["shape"], {})[record["path"]] = record["best_ms"]
    paths = list(dict.fromkeys(path for each in times.values() for path in each))
    rows = [[shape, *(_cell(each.get(path)) for path in paths)] for shape, each in times.items()]
    return ["## Kernels and peers side by side, in ms", "", *_grid(["", *paths], rows), ""] if rows else []


def _table(name: str, records: Sequence[Mapping[str, Any]], *, figures: bool) -> list[str]:
    columns = [each for each in COLUMNS[name] if figures or each.startswith(_FIGURES)]
    used = [column for column in columns if any(column in record for record in records)]
    rows = [
        [record["key"], *(_cell(record.get(column)) for column in used)] for record in records if _any(record, used)
    ]
    notes = [f"- {record['key']}: {_note(record)}" for record in records if _note(record)]
    grid = [*_grid(["", *used], rows), ""] if rows else []
    return [f"## {name}", "", *grid, *notes, *([""] if notes else [])] if grid or notes else []


def _any(record: Mapping[str, Any], columns: Sequence[str]) -> bool:
    return any(column in record for column in columns)


def _note(record: Mapping[str, Any]) -> str:
    """Return the reason for a missing figure, in one line."""
    text = next((str(record[name]) for name in ("error", "skipped", "reason") if name in record), "")
    return text.strip().splitlines()[0][:200] if text.strip() else ""


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "**no**"
        case float():
            return f"{value:.4g}"
    return str(value).replace("|", "\\|")


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]
