"""Cases of transformers.json: the regions that transformers finds in a text, and the expected message."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxinfer.parsers.events import Event, Message, message_of
from jaxinfer.parsers.response_template.regions import TemplateParser
from jaxinfer.parsers.response_template.template import FIELDS, Kind, read_template
from jaxinfer.parsers.tools import Tools

_FILE = json.loads((pathlib.Path(__file__).parent / "data/transformers.json").read_text(encoding="utf-8"))
TEMPLATES: dict[str, dict[str, Any]] = _FILE["templates"]
READ = {name: read_template(raw) for name, raw in TEMPLATES.items()}


@dataclasses.dataclass(frozen=True)
class Case:
    """A text, and its content, reasoning and tool calls."""

    name: str
    template: str
    prompt: str
    tools: Sequence[dict[str, Any]]
    text: str
    content: str
    reasoning: str
    calls: Sequence[tuple[str, Any]]

    def parser(self) -> TemplateParser:
        return TemplateParser(READ[self.template], Tools(self.tools), self.prompt, lambda index: f"id{index}")

    def parse(self, cuts: Sequence[int]) -> list[Event]:
        parser, edges = self.parser(), [0, *cuts, len(self.text)]
        events = [event for a, b in itertools.pairwise(edges) for event in parser.feed(self.text[a:b])]
        return events + parser.finish()

    def message(self, cuts: Sequence[int] = ()) -> Message:
        return message_of(self.parse(cuts))


def _case(raw: dict[str, Any]) -> Case:
    tools, name = _FILE["tools"].get(raw.get("tools", ""), []), raw["template"]
    texts = {kind: _joined(TEMPLATES[name], raw["regions"], kind) for kind in (Kind.CONTENT, Kind.REASONING)}
    found = texts[Kind.CONTENT], texts[Kind.REASONING], _calls(raw["regions"])
    if "differs" in raw:
        found = raw["content"], raw["reasoning"], [(called, arguments) for called, arguments in raw["calls"]]
    return Case(raw["name"], name, raw.get("prefix", ""), tools, raw["text"], *found)


def _joined(template: dict[str, Any], regions: Sequence[Sequence[Any]], kind: Kind) -> str:
    """Return the texts of a kind, joined. transformers keeps only the last unless the template joins them."""
    (name,) = {name for name in template["fields"] if FIELDS[name] == kind} or {""}
    join = template["fields"].get(name, {}).get("join")
    return ("\n" if join is None else join).join(value for field, value in regions if field == name and value)


def _calls(regions: Sequence[Sequence[Any]]) -> Sequence[tuple[str, Any]]:
    values = [value for field, value in regions if FIELDS[field] == Kind.CALLS]
    calls = [call for value in values for call in (value if isinstance(value, list) else [value])]
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


CASES = [_case(raw) for raw in _FILE["cases"]]
