"""Slot assignment of adapters."""

from __future__ import annotations

import collections

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxinfer.lora.slots import Slots
from tests.lora.fakes import make_adapter, parts_of


def filled(count: int, *contents: int) -> Slots:
    """Return slots with loaded, unused adapters."""
    slots = Slots(count)
    for content in contents:
        put(slots, content)
    return slots


def put(slots: Slots, content: int) -> str | None:
    number = slots.vacant()
    assert number is not None
    before = slots.place(number, format(content, "x"), parts_of(make_adapter(content)))
    while slots.next_load():
        pass
    return before


def test_an_adapter_is_usable_with_its_last_part() -> None:
    slots = Slots(2)
    slots.place(1, "a", parts_of(make_adapter(10)))
    seen = []
    while (load := slots.next_load()) is not None:
        seen.append((load[0], load[1], slots.usable("a")))
    assert seen == [(1, 0, False), (1, 1, False), (1, 2, True)]
    assert slots.next_load() is None


def test_two_that_come_are_loaded_one_after_another() -> None:
    slots = Slots(2)
    slots.place(0, "a", parts_of(make_adapter(10)))
    slots.place(1, "b", parts_of(make_adapter(11)))
    loads = [slots.next_load() for _ in range(6)]
    assert [load[:2] for load in loads if load is not None] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_the_least_recently_used_gives_way() -> None:
    slots = filled(3, 1, 2, 3)
    slots.acquire("1")
    slots.release("1")
    assert put(slots, 4) == "2"
    assert put(slots, 5) == "3"
    assert put(slots, 6) == "1"


def test_who_is_used_stays() -> None:
    slots = filled(2, 1, 2)
    assert slots.acquire("1") == 0
    slots.acquire("1")
    assert put(slots, 3) == "2"
    assert put(slots, 4) == "3"
    slots.release("1")
    slots.acquire("4")
    assert slots.vacant() is None
    slots.release("1")
    assert slots.vacant() == 0


def test_a_launched_step_is_read_before_its_slot_is_written() -> None:
    slots = filled(1, 1)
    slots.acquire("1")
    for _ in range(2):
        slots.launched()
    slots.release("1")
    assert slots.vacant() is None
    slots.read()
    assert slots.vacant() is None, "the second step may use it"
    slots.launched()
    slots.read()
    assert slots.vacant() == 0, "the third was launched when nobody ran with it"


def test_the_spared_is_passed_over() -> None:
    slots = filled(2, 1, 2)
    assert slots.vacant(lambda identity: identity == "1") == 1
    assert slots.vacant(lambda identity: True) is None
    assert filled(2, 1).vacant(lambda identity: True) == 1, "an empty slot has nobody to spare"


def test_what_must_not_be_is_refused() -> None:
    with pytest.raises(ValueError, match="count = 0"):
        Slots(0)
    slots = Slots(1)
    slots.place(0, "a", parts_of(make_adapter(10)))
    with pytest.raises(AssertionError, match="before all of it is loaded"):
        slots.acquire("a")
    with pytest.raises(AssertionError, match="cannot be placed in slot 0, which has a"):
        slots.place(0, "b", parts_of(make_adapter(11)))
    while slots.next_load():
        pass
    with pytest.raises(AssertionError, match="more often"):
        slots.release("a")
    slots.acquire("a")
    with pytest.raises(AssertionError, match="pinned by"):
        slots.check([])


class Machine(RuleBasedStateMachine):
    """Random operations, with a device two steps behind: each step reads the adapter that it was launched with."""

    @initialize(count=st.integers(1, 4))
    def begin(self, count: int) -> None:
        self.slots = Slots(count)
        self.banks: list[list[str]] = [[] for _ in range(count)]  # contents of each part of each slot
        self.running: list[tuple[str, int]] = []
        self.unread: collections.deque[list[tuple[str, int]]] = collections.deque()

    @rule(content=st.integers(1, 8))
    def place(self, content: int) -> None:
        number, identity = self.slots.vacant(), format(content, "x")
        if number is not None and identity not in self.slots:
            used = {slot for step in self.unread for _, slot in step} | {slot for _, slot in self.running}
            assert number not in used, "a slot is written that is in use"
            self.slots.place(number, identity, parts_of(make_adapter(content)))

    @rule(content=st.integers(1, 8))
    def admit(self, content: int) -> None:
        if self.slots.usable(identity := format(content, "x")):
            self.running.append((identity, self.slots.acquire(identity)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        identity, _ = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.slots.release(identity)

    @precondition(lambda self: len(self.unread) < 2)
    @rule()
    def launch(self) -> None:
        if (load := self.slots.next_load()) is not None:
            slot, part, arrays = load
            self.banks[slot] = [*self.banks[slot][: part or 0], format(int(arrays["w:a"][0]), "x")]
        for identity, slot in self.running:
            assert self.banks[slot] == [identity] * 3
        self.unread.append(list(self.running))
        self.slots.launched()

    @precondition(lambda self: self.unread)
    @rule()
    def read(self) -> None:
        self.unread.popleft()
        self.slots.read()

    @invariant()
    def pins_are_those_of_who_runs(self) -> None:
        if hasattr(self, "slots"):
            self.slots.check(self.running)


def test_slots_over_random_use() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=300, stateful_step_count=60))
