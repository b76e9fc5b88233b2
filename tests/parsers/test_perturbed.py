"""Tests of perturbed calls: they give calls or text, identical for every chunking, and JSON arguments."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from jaxinfer.parsers.events import Message, message_of
from jaxinfer.parsers.registry import Parsers
from jaxinfer.parsers.tools import Tools
from tests.parsers.perturbed import (
    DAMAGES,
    FAMILIES,
    HARMLESS,
    IN_TEXT,
    TOOLS,
    WRITES,
    Calls,
    Family,
    Write,
    calls_of,
    chunkings,
    dumps,
)

THINKS = frozenset({"hermes", "qwen3_coder", "glm45", "deepseek_v3", "deepseek_v31", "kimi_k2"})
SLICE, ALL = 300, 20_000

each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def names_of(family: Family) -> list[dict[str, Any]]:
    """Return the tools; Python has no hyphens in names."""
    if family.name != "pythonic":
        return TOOLS
    return [{"function": {**each["function"], "name": each["function"]["name"].replace("-", "_")}} for each in TOOLS]


def read(parsers: Parsers, parts: Sequence[str], tools: Sequence[dict[str, Any]]) -> Message:
    parser = parsers.make(Tools(tools), new_id=lambda index: f"id{index}")
    assert parser is not None
    events = [event for part in parts for event in parser.feed(part)]
    return message_of([*events, *parser.finish()])


def strict(arguments: str) -> Any:
    """Parse JSON that is valid UTF-8 and has no duplicate keys."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), f"a key twice: {arguments}"
        return dict(pairs)

    return json.loads(arguments.encode().decode(), object_pairs_hook=once)


def check(family: Family, answer: str, rng: random.Random, *, thinks: bool = False) -> Message:
    """Check the invariants of every answer."""
    parsers, tools = family.parsers(thinks=thinks), names_of(family)
    whole = read(parsers, [answer], tools)
    for parts in chunkings(rng, answer):
        assert read(parsers, parts, tools) == whole, parts
    hidden = Parsers(family.name).markers
    assert not [marker for marker in hidden if marker in whole.content]
    for call in whole.calls:
        strict(call.arguments)
    return whole


def whole_text(found: Any) -> Any:
    """Return the value with lone surrogates replaced."""
    return json.loads(
        json.dumps(found, ensure_ascii=False).encode("utf-8", "replace").decode().replace("?!", "\ufffd!")
    )


def written(calls: Calls, family: Family) -> Calls:
    named = [(name.replace("-", "_") if family.name == "pythonic" else name, found) for name, found in calls]
    return [(name, whole_text(found)) for name, found in named]


def made(message: Message) -> Calls:
    return [(call.name, strict(call.arguments)) for call in message.calls]


def draw(family: Family, rng: random.Random, write: Write = dumps) -> tuple[Calls, list[str]]:
    tags = family if family.name in IN_TEXT else Family(family.name, ("<b>", "</i>", "[x]"), family.write)
    calls = calls_of(rng, tags, surrogates=family.name != "pythonic")
    return calls, family.write(rng, calls, write)


def damaged(family: Family, seed: int, count: int) -> None:
    for number in range(count):
        rng = random.Random(f"{seed} {family.name} {number}")
        _, pieces = draw(family, rng, rng.choice(WRITES))
        damage = rng.choice(DAMAGES)
        answer = "".join(damage(rng, pieces))
        message = check(family, answer, rng)
        is_there = message.calls or message.content.strip() or message.reasoning
        assert is_there or damage.__name__ in ("cut", "drop"), answer


def harmless(family: Family, seed: int, count: int) -> None:
    for number in range(count):
        rng = random.Random(f"{seed} {family.name} harmless {number}")
        calls, pieces = draw(family, rng, rng.choice(WRITES))
        change = rng.choice(HARMLESS)
        thinks = family.thinks is not None and family.name in THINKS and rng.random() < 0.2
        thought = "<think>\nHm, so I call.\n" if thinks else ""
        answer = thought + "".join(change(rng, pieces))
        message = check(family, answer, rng, thinks=thinks)
        assert made(message) == written(calls, family), answer
        assert not message.content.strip(), answer
        assert message.reasoning == ("Hm, so I call." if thinks else ""), answer


@each_family
def test_a_call_with_one_thing_wrong_is_a_call_or_text(family: Family) -> None:
    damaged(family, 0, SLICE)


@each_family
def test_what_does_no_harm_changes_no_call(family: Family) -> None:
    harmless(family, 0, SLICE)


@pytest.mark.slow
@each_family
def test_all_of_both(family: Family, seed: int) -> None:
    damaged(family, seed, ALL)
    harmless(family, seed, ALL // 4)
