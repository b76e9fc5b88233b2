"""Tests of parser detection from chat templates of published models."""

import json
from typing import Any

import pytest

from jaxinfer.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, Parsers, detect
from tests.parsers.recorded import DATA

DETECTED: dict[str, Any] = json.loads((DATA / "templates/detected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", DETECTED)
def test_a_template_tells_its_parsers(name: str) -> None:
    case = DETECTED[name]
    assert detect("\n".join(case["markers"])) == Parsers(*case["parsers"])


def test_all_forms_but_aliases_are_met() -> None:
    """Other versions of a format are selected only by name."""
    calls, thoughts = ({case["parsers"][i] for case in DETECTED.values()} for i in range(2))
    assert set(TOOL_PARSERS) - calls == {"glm47", "llama4_pythonic"}
    assert set(REASONING_PARSERS) <= thoughts


@pytest.mark.parametrize(
    ("markers", "parsers"),
    [
        ("<tool_call><invoke name=", Parsers()),  # MiniMax's tags inside
        ("<seed:tool_call><function=f><parameter=p>", Parsers()),
        ('<|header_start|>"parameters"', Parsers("llama3_json")),
        ("[func_name1(param=1)]", Parsers("pythonic")),
    ],
)
def test_forms_that_look_like_another(markers: str, parsers: Parsers) -> None:
    assert detect(markers) == parsers
