"""The results as Markdown: one table per section, with the measurements and the limits of the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.gpu_check.goals import has_times, verdicts

NOT_A_GPU = "not a GPU: only that it runs was checked"
# Figures of a CPU are only in the JSON file, which tests read; in a table they would look like results.
_FIGURES = ("ok", "same_bits", "kernels_of", "pool_copies", "equal_tokens", "classes", "row_depends")


def markdown(content: Mapping[str, Any], columns: Mapping[str, Sequence[str]]) -> str:
    """Write the content of a results file in Markdown.

    Args:
        columns: columns of the table of each section.
    """
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
        if columns.get(name):
            shown = [each for each in columns[name] if figures or each.startswith(_FIGURES)]
            lines += _table(name, section["records"], shown)
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


def _table(name: str, records: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[str]:
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
