"""Parts of the tests that a check runs: over as many checks as there are parts, each test is in one."""

import dataclasses
import pathlib
from typing import Any

from tests.conftest import _in_other_files, _not_in_turn, _others_of_files


@dataclasses.dataclass(eq=False)
class Item:
    """Of pytest's items what the choice reads."""

    path: pathlib.Path
    turn: bool

    def get_closest_marker(self, name: str) -> bool | None:
        return self.turn or None if name == "turn" else None


def items_of(counts: dict[str, int], turn: bool = False) -> list[Any]:
    return [Item(path=pathlib.Path(name), turn=turn) for name, count in counts.items() for _ in range(count)]


def test_files_are_dealt_out() -> None:
    items = items_of({"b": 2, "a": 3, "c": 1, "d": 4, "e": 1})
    chosen = [{item.path.name for item in items if item not in _in_other_files(items, part, 2)} for part in (1, 2)]
    assert chosen == [{"a", "c", "e"}, {"b", "d"}]


def test_of_those_that_take_turns_one_of_each_file_is_left() -> None:
    turns, others = items_of({"a": 3, "b": 2}, turn=True), items_of({"a": 2})
    items, seen = [*others, *turns], set()
    for turn in range(1, 7):
        left = [item for item in items if item not in _not_in_turn(items, turn)]
        assert left[:2] == others
        assert sorted(item.path.name for item in left[2:]) == ["a", "b"]
        seen |= set(left)
    assert seen == set(items)


def test_the_tests_of_each_file_are_dealt_out() -> None:
    items = items_of({"a": 3, "b": 2, "c": 1})
    chosen = [[item for item in items if item not in _others_of_files(items, part, 2)] for part in (1, 2)]
    assert [[item.path.name for item in each] for each in chosen] == [["a", "a", "b", "c"], ["a", "b"]]
    assert set(chosen[0]) | set(chosen[1]) == set(items)
