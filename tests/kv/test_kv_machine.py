"""Random lives of sequences against a device that holds bytes: every slot always reads back exactly its own tokens."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from jaxinfer.kv.manager import KVConfig, KVManager
from tests.kv.fake_device import FakeDevice, FakeSequence

PAGE, PAGES, SLOTS, WIDTH = 4, 14, 4, 8
# Few beginnings, so that most prompts meet pages of others, whole or in part.
BEGINNINGS = [(1,) * 9, (1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 1, 3), (1, 1, 2), (5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8, 5, 6)]
TAILS = st.lists(st.integers(1, 2), min_size=1, max_size=6)


class Cache(RuleBasedStateMachine):
    config: KVConfig

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVManager(self.config)
        self.device = FakeDevice(self.kv)
        self.running: list[FakeSequence] = []
        self.swapped: list[FakeSequence] = []

    def slot(self) -> int | None:
        free = set(range(SLOTS)) - {sequence.slot for sequence in self.running}
        return min(free, default=None)

    def choose(self, data, of: list[FakeSequence]) -> FakeSequence:
        return of[data.draw(st.integers(0, len(of) - 1))]

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
        new = FakeSequence(salt, tokens, len(tokens) - prompt, kind, PAGE)
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
    @rule(data=st.data(), count=st.integers(1, 9), token=st.integers(1, 2))
    def advance(self, data, count, token):
        sequence = self.choose(data, self.running)
        length = min(sequence.scheduled + count, WIDTH * PAGE)
        before = self.kv.usage()
        if not self.kv.extend(sequence.slot, length):
            assert self.kv.usage() == before
            return
        sequence.feed([token] * (length - len(sequence.tokens)))
        sequence.scheduled = length

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def publish(self, data):
        sequence = self.choose(data, self.running)
        self.kv.publish(sequence.slot, sequence.keys, sequence.codes, sequence.launched)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def slide(self, data):
        sequence = self.choose(data, self.running)
        self.kv.slide(sequence.slot, sequence.launched)

    @precondition(lambda self: self.running and len(self.running) < SLOTS)
    @rule(data=st.data(), back=st.integers(0, 5), tail=TAILS)
    def fork(self, data, back, tail):
        parent = self.choose(data, self.running)
        length = max(parent.launched - back, 0)
        slot, before = self.slot(), self.kv.usage()
        if not self.kv.fork(parent.slot, slot, length):
            assert self.kv.usage() == before
            return
        tokens = [*parent.tokens[:length], *tail]
        child = FakeSequence(parent.namespace, tokens, min(parent.prompt, length), parent.kind, PAGE)
        child.slot, child.scheduled, child.launched = slot, length, length
        self.running.append(child)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data):
        sequence = self.choose(data, self.running)
        self.kv.release(sequence.slot)
        self.running.remove(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def swap_out(self, data):
        sequence = self.choose(data, self.running)
        before = self.kv.usage()
        sequence.swapped = self.kv.swap_out(sequence.slot, sequence.launched)
        if sequence.swapped is None:
            assert self.kv.usage() == before
            return
        self.running.remove(sequence)
        self.swapped.append(sequence)
        sequence.slot, sequence.scheduled = -1, sequence.launched

    @precondition(lambda self: self.swapped and len(self.running) < SLOTS)
    @rule(data=st.data())
    def swap_in(self, data):
        sequence = self.choose(data, self.swapped)
        slot = self.slot()
        if not self.kv.swap_in(slot, sequence.swapped):
            return
        sequence.slot = slot
        self.swapped.remove(sequence)
        self.running.append(sequence)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def drop(self, data):
        sequence = self.choose(data, self.swapped)
        self.swapped.remove(sequence)
        self.kv.drop(sequence.swapped)

    @rule()
    def reset(self):
        self.kv.reset_prefix_cache()
        assert self.kv.usage().cached == 0

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


@pytest.mark.parametrize("windows", [(None,), (8,), (None, 6)], ids=str)
@pytest.mark.parametrize("host_pages", [0, 7])
@pytest.mark.parametrize("caching", [True, False])
def test_every_slot_reads_back_its_own_tokens(windows, host_pages, caching):
    class Configured(Cache):
        config = KVConfig(PAGES, PAGE, SLOTS, WIDTH, windows, host_pages, caching)

    examples = 40 if caching else 10
    run_state_machine_as_test(
        Configured,
        settings=settings(
            max_examples=examples, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
