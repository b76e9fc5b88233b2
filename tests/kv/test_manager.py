"""Pages are never lost, never held twice."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from jaxinfer.kv.blocks import BlockPool, OutOfPagesError
from jaxinfer.kv.manager import KVManager

PAGES, PAGE, ROWS, WIDTH = 12, 16, 4, 6


class Slots(RuleBasedStateMachine):
    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVManager(PAGES, PAGE, ROWS, WIDTH)
        self.free_slots = list(range(ROWS))

    @rule(target=taken, tokens=st.integers(1, WIDTH * PAGE))
    def reserve(self, tokens):
        if not self.free_slots or not self.kv.has_room(tokens):
            return multiple()
        before = self.kv.free_pages
        slot = self.free_slots.pop()
        self.kv.reserve(slot, tokens)
        assert before - self.kv.free_pages == -(-tokens // PAGE)
        return slot

    @rule(slot=consumes(taken))
    def release(self, slot):
        self.kv.release(slot)
        self.free_slots.append(slot)

    @invariant()
    def accounted_for(self):
        self.kv.check()


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_running_out_takes_nothing():
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(OutOfPagesError, match="2 pages asked for, 1 of 3 are free"):
        pool.allocate(2)
    assert pool.free == 1
    pool.check()


def test_a_page_cannot_be_released_twice():
    pool = BlockPool(3)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release(pages)
