"""Cases of other engines' tests, stored in data/ (its README lists the sources)."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxinfer.parsers.registry import Parsers

DATA = pathlib.Path(__file__).parent / "data"


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A case. ``calls``: names and arguments, parsed if valid JSON. ``differs``: why the engine's result differs."""

    name: str
    parsers: Parsers
    prompt: str
    tools: Sequence[dict[str, Any]]
    text: str
    content: str
    reasoning: str
    calls: Sequence[tuple[str, Any]]
    differs: str


def read_cases(path: pathlib.Path) -> list[Recorded]:
    """Return the cases of a file."""
    file = json.loads(path.read_text(encoding="utf-8"))
    return [_case(f"{path.stem}/{case['name']}", case, file["tools"]) for case in file["cases"]]


def _case(name: str, case: dict[str, Any], tools: dict[str, Any]) -> Recorded:
    return Recorded(
        name,
        Parsers(*case["parsers"]),
        case.get("prompt", ""),
        tools.get(case.get("tools", ""), []),
        case["text"],
        case.get("content", ""),
        case.get("reasoning", ""),
        [(called, arguments) for called, arguments in case.get("calls", [])],
        case.get("differs", ""),
    )


FILES = sorted(path for path in DATA.glob("*.json"))
RECORDED = [case for path in FILES for case in read_cases(path)]
