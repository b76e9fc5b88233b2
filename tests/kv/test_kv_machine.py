"""Random sequence histories on a fake device: every slot always reads back exactly its own tokens."""

import itertools
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from jaxinfer.kv.manager import KVConfig, KVManager
from jaxinfer.types import STATE
from tests.kv.fake_device import FakeDevice, FakeSequence, check_order

PAGE, PAGES, SLOTS, WIDTH, STATES = 4, 14, 4, 8, 9
# Few prefixes, so that most prompts share whole or partial pages with others.
BEGINNINGS = [(1,) * 9, (1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 1, 3), (1, 1, 2), (5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8, 5, 6)]
PICK = st.integers(0, SLOTS - 1)
TAILS = st.lists(st.integers(1, 2), min_size=1, max_size=6)


class Cache(RuleBasedStateMachine):
    config: KVConfig

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVManager(self.config)
        self.device = FakeDevice(self.kv)
        self.running: list[FakeSequence] = []
        self.swapped: list[FakeSequence] = []
        self.forked, self.era = False, 0

    def slot(self) -> int | None:
        free = set(range(SLOTS)) - {sequence.slot for sequence in self.running}
        return min(free, default=None)

    @precondition(lambda self: len(self.running) < SLOTS)
    @rule(
        beginning=st.sampled_from(BEGINNINGS),
        tail=TAILS,
        prompt=st.integers(0, 4),
        kind=st.integers(0, 1),
        salt=st.sampled_from([b"", b"", b"other"]),
        chunk=st.integers(1, 12),
    )
    def admit(self, beginning, tail, prompt, kind, salt, chunk):
        tokens = [*beginning, *tail]
        new = FakeSequence(salt, tokens, len(tokens) - prompt, kind, PAGE, era=self.era)
        match = self.kv.match(new.keys, new.codes, len(tokens) - 1)
        assert match.tokens < len(tokens)
        length = min(match.tokens + chunk, len(tokens))
        slot, before = self.slot(), self.kv.usage()
        if not self.kv.admit(slot, match, length):
            assert self.kv.usage() == before
            return
        new.slot, new.launched, new.scheduled = slot, match.tokens, length
        self.running.append(new)

    @precondition(lambda self: self.running)
    @rule(pick=PICK, count=st.integers(1, 9), token=st.integers(1, 2))
    def advance(self, pick, count, token):
        sequence = self.running[pick % len(self.running)]
        length = min(sequence.scheduled + count, WIDTH * PAGE)
        before = self.kv.usage()
        if not self.kv.extend(sequence.slot, length):
            assert self.kv.usage() == before
            return
        sequence.feed([token] * (length - len(sequence.tokens)))
        sequence.scheduled = length

    @precondition(lambda self: self.running)
    @rule(pick=PICK)
    def publish(self, pick):
        sequence = self.running[pick % len(self.running)]
        self.kv.publish(sequence.slot, sequence.keys, sequence.codes, sequence.launched)

    @precondition(lambda self: self.running)
    @rule(pick=PICK)
    def slide(self, pick):
        sequence = self.running[pick % len(self.running)]
        self.kv.slide(sequence.slot, sequence.launched)

    @precondition(lambda self: self.running and len(self.running) < SLOTS)
    @rule(pick=PICK, back=st.integers(0, 5), tail=TAILS)
    def fork(self, pick, back, tail):
        parent = self.running[pick % len(self.running)]
        length = max(parent.launched - back, 0)
        slot, before = self.slot(), self.kv.usage()
        if not self.kv.fork(parent.slot, slot, length):
            assert self.kv.usage() == before
            return
        self.forked = True
        tokens = [*parent.tokens[:length], *tail]
        prompt = min(parent.prompt, length)
        child = FakeSequence(parent.namespace, tokens, prompt, parent.kind, PAGE, era=parent.era)
        child.slot, child.scheduled, child.launched = slot, length, length
        self.running.append(child)

    @precondition(lambda self: len(self.running) > 1)
    @rule(pick=PICK)
    def adopt(self, pick):
        """Exchange the slots of two sequences, as when a sequence continues with a fork's pages."""
        one, other = self.running[pick % len(self.running)], self.running[(pick + 1) % len(self.running)]
        if one is not other:
            self.kv.adopt(one.slot, other.slot)
            one.slot, other.slot = other.slot, one.slot

    @precondition(lambda self: self.running)
    @rule(pick=PICK)
    def release(self, pick):
        sequence = self.running[pick % len(self.running)]
        self.kv.release(sequence.slot)
        self.running.remove(sequence)

    @precondition(lambda self: self.running)
    @rule(pick=PICK)
    def swap_out(self, pick):
        sequence = self.running[pick % len(self.running)]
        before = self.kv.usage()
        sequence.swapped = self.kv.swap_out(sequence.slot, sequence.launched)
        if sequence.swapped is None:
            assert self.kv.usage() == before
            return
        self.running.remove(sequence)
        self.swapped.append(sequence)
        sequence.slot, sequence.scheduled = -1, sequence.launched

    @precondition(lambda self: self.swapped and len(self.running) < SLOTS)
    @rule(pick=PICK)
    def swap_in(self, pick):
        sequence = self.swapped[pick % len(self.swapped)]
        slot = self.slot()
        if not self.kv.swap_in(slot, sequence.swapped):
            return
        sequence.slot = slot
        self.swapped.remove(sequence)
        self.running.append(sequence)

    @precondition(lambda self: self.swapped)
    @rule(pick=PICK)
    def drop(self, pick):
        sequence = self.swapped[pick % len(self.swapped)]
        self.swapped.remove(sequence)
        self.kv.drop(sequence.swapped)

    @precondition(lambda self: len(self.running) < SLOTS)
    @rule(beginning=st.sampled_from(BEGINNINGS), tail=TAILS, more=st.integers(0, 9), stay=st.booleans())
    def serve(self, beginning, tail, more, stay):
        """Run a typical sequence in one rule: several rules in the right order."""
        known = len(self.running)
        self.admit(beginning, tail, 1, 0, b"", len(beginning) + len(tail))
        if len(self.running) == known:
            return
        self.step()
        self.publish(known)
        self.advance(known, more + 1, 1)
        if not stay:
            self.step()
            self.publish(known)
            self.release(known)

    @rule(sure=st.integers(0, 5))
    def reset(self, sure):
        if sure:
            return
        held = self.kv.usage().held
        self.kv.reset_prefix_cache()
        assert (self.kv.usage().cached, self.kv.usage().held) == (0, held)
        self.era += 1

    @rule()
    def step(self):
        self.device.move(*self.kv.take_moves())
        for sequence in self.running:
            self.device.compute(sequence, self.running)
        for sequence in self.running:
            self.device.verify(sequence)

    @invariant()
    def accounted_for(self):
        self.kv.check()
        if not self.forked:  # a fork holds pages, but perhaps not their parents in the tree
            check_order(self.kv)

    def teardown(self):
        self.step()
        for sequence in self.running:
            self.kv.release(sequence.slot)
        for sequence in self.swapped:
            self.kv.drop(sequence.swapped)
        self.kv.reset_prefix_cache()
        self.kv.take_moves()
        self.kv.reset_prefix_cache()
        usage = self.kv.usage()
        assert (usage.free, usage.host_used) == (usage.total, 0), "something leaked"
        assert next(self.kv._store.tree.nodes(), None) is None


@pytest.mark.parametrize(
    ("windows", "host_pages"),
    [*itertools.product([(None,), (8,), (None, 6)], [0, 7]), ((None, STATE), 0), ((None, 6, STATE), 0)],
    ids=str,
)
@pytest.mark.parametrize("caching", [True, False])
def test_every_slot_reads_back_its_own_tokens(windows, host_pages, caching):
    class Configured(Cache):
        config = KVConfig(PAGES, PAGE, SLOTS, WIDTH, windows, host_pages, caching, STATES)

    examples = 20 if caching else 10
    run_state_machine_as_test(
        Configured,
        settings=settings(
            max_examples=examples, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


# Relative frequency of rules in a long run: more cache-filling rules than in shrinkable examples.
WEIGHTS = {
    "serve": 6,
    "admit": 4,
    "advance": 6,
    "publish": 4,
    "step": 6,
    "release": 3,
    "slide": 2,
    "fork": 2,
    "adopt": 1,
}
RARE = {"swap_out": 1, "swap_in": 2, "drop": 0.2, "reset": 0.02}


def _arguments(rng: random.Random) -> dict[str, dict]:
    tail = [rng.randint(1, 2) for _ in range(rng.randint(1, 6))]
    prompt = {"beginning": rng.choice(BEGINNINGS), "tail": tail}
    pick = {"pick": rng.randrange(SLOTS)}
    salt, kind = rng.choice([b"", b"", b"other"]), rng.randint(0, 1)
    return {
        "serve": {**prompt, "more": rng.randint(0, 9), "stay": rng.random() < 0.4},
        "admit": {**prompt, "prompt": rng.randint(0, 4), "kind": kind, "salt": salt, "chunk": rng.randint(1, 12)},
        "advance": {**pick, "count": rng.randint(1, 9), "token": rng.randint(1, 2)},
        "fork": {**pick, "back": rng.randint(0, 5), "tail": tail},
        "reset": {"sure": 0},
        "step": {},
    } | dict.fromkeys(["publish", "release", "slide", "swap_out", "swap_in", "drop", "adopt"], pick)


def _allowed(machine: Cache, name: str) -> bool:
    free = len(machine.running) < SLOTS
    if name in ("swap_in", "drop"):
        return bool(machine.swapped) and free
    if name in ("serve", "admit"):
        return free
    if name == "adopt":
        return len(machine.running) > 1
    return bool(machine.running) and (free or name != "fork")


@pytest.mark.parametrize(
    ("windows", "host_pages"),
    [*itertools.product([(None,), (8,), (None, 6), (5, 11)], [0, 3, 9]), ((None, STATE), 0), ((6, STATE), 0)],
    ids=str,
)
@pytest.mark.parametrize("steps", [300, pytest.param(8_000, marks=pytest.mark.slow)])
def test_a_long_life(windows, host_pages, steps):
    class Configured(Cache):
        config = KVConfig(PAGES, PAGE, SLOTS, WIDTH, windows, host_pages, states=STATES)

    machine, rng = Configured(), random.Random(repr((windows, host_pages, steps)))
    rules = WEIGHTS | RARE
    for step in range(steps):
        (name,) = rng.choices(list(rules), list(rules.values()))
        if name == "fork" and step < steps // 2:
            continue
        if name in ("step", "reset") or _allowed(machine, name):
            getattr(machine, name)(**_arguments(rng)[name])
            machine.accounted_for()
    machine.teardown()
