"""A fake device that stores hashes as keys and values, and sequences that know the expected hashes.

A token's entry in the cache depends on all tokens before it and on the program that computed it. So does its hash: a
page that is shared wrongly, copied too late or written while shared reads back a different hash. A state is the hash of
the last token that it has seen.
"""

from __future__ import annotations

import dataclasses

from jaxinfer.kv.manager import KVConfig, KVManager, Swapped
from jaxinfer.kv.radix import PageKeys
from jaxinfer.kv.store import Copy, Export, Import
from jaxinfer.types import NO_STATE, STATE

GARBAGE = -1


def page_code(page: int, size: int, prompt: int, kind: int) -> int:
    """Return the code of a page if the sequence's first ``prompt`` tokens ran in prefill programs of class ``kind``."""
    split = min(max(prompt - page * size, 0), size)
    return kind * (size + 1) + split if split else 0


@dataclasses.dataclass(eq=False)
class FakeSequence:
    """A sequence with ``scheduled`` tokens, of which ``launched`` are written on the device.

    ``era``: cache resets before it began; it may share only pages of its own era.
    """

    namespace: bytes
    tokens: list[int]
    prompt: int
    kind: int
    size: int
    slot: int = -1
    scheduled: int = 0
    launched: int = 0
    swapped: Swapped | None = None
    era: int = 0

    def __post_init__(self) -> None:
        self.keys = PageKeys(self.namespace, self.size)
        self.expected: list[int] = []
        self.feed(())

    def feed(self, tokens) -> None:
        """Append tokens and compute their expected cache entries."""
        self.tokens.extend(tokens)
        self.keys.extend(self.tokens[len(self.expected) :])
        for at in range(len(self.expected), len(self.tokens)):
            before = self.expected[-1] if at else hash((self.namespace, self.era))
            program = self.kind if at < self.prompt else "decode"
            self.expected.append(hash((before, self.tokens[at], program)))

    @property
    def codes(self) -> list[int]:
        pages = -(-len(self.tokens) // self.size)
        return [page_code(page, self.size, self.prompt, self.kind) for page in range(pages)]


class FakeDevice:
    """Pages of hashes in each group and on the host; executes moves in the documented order."""

    def __init__(self, kv: KVManager) -> None:
        config: KVConfig = kv.config
        self.kv, self.size, self.windows = kv, config.page_size, config.windows
        counts = [config.states if window == STATE else config.pages for window in config.windows]
        self.pages = [[[GARBAGE] * self.size for _ in range(count)] for count in counts]
        self.host: list[list[list[int] | None] | None] = [None] * config.host_pages

    def move(self, exports: list[Export], copies: list[Copy], imports: list[Import]) -> None:
        self._check_targets([*copies, *imports])
        for source, host in exports:
            self.host[host] = [self._read(group, page) for group, page in enumerate(source)]
        at_once = [[self._read(group, page) for group, page in enumerate(source)] for source, _ in copies]
        for (source, target), read in zip(copies, at_once, strict=True):
            assert [self._read(group, page) for group, page in enumerate(source)] == read, "the order of copies matters"
            self._write(target, read)
        for host, target in imports:
            held = self.host[host]
            assert held is not None, "a host page was read before it was written"
            self._write(target, held)

    def _read(self, group: int, page: int) -> list[int] | None:
        return list(self.pages[group][page]) if page >= 0 else None

    def _write(self, target, read) -> None:
        for group, page in enumerate(target):
            if page >= 0:
                assert read[group] is not None, "a page was asked for that nobody had"
                self.pages[group][page] = list(read[group])

    def _check_targets(self, moves) -> None:
        targets = [place for move in moves for place in enumerate(move.target) if place[1] >= 0]
        assert len(targets) == len(set(targets)), "a page is written twice"

    def compute(self, sequence: FakeSequence, others: list[FakeSequence]) -> None:
        """Write the scheduled tokens of a sequence; no other sequence may hold the written pages."""
        self._verify_state(sequence)
        for at in range(sequence.launched, sequence.scheduled):
            for group, window in enumerate(self.windows):
                page = int(self.kv.tables[group, sequence.slot, at // self.size])
                if window == STATE and page == NO_STATE:
                    continue  # no state is kept for this page
                for other in others:
                    assert other is sequence or not self._shows(group, other, page), "a shared page was written"
                assert self.kv._store.pools[group].owner(page) is None, "a cached page was written"
                self.pages[group][page][0 if window == STATE else at % self.size] = sequence.expected[at]
        sequence.launched = sequence.scheduled

    def _shows(self, group: int, sequence: FakeSequence, page: int) -> bool:
        held = self.kv._slots[sequence.slot]
        return page in held.pages[group]

    def verify(self, sequence: FakeSequence) -> None:
        """Check that all entries visible to the next query are this sequence's own."""
        self._verify_state(sequence)
        for group, window in enumerate(self.windows):
            if window == STATE:
                continue
            first = 0 if window is None else max(0, sequence.launched - window + 1)
            table = self.kv.tables[group, sequence.slot]
            for at in range(first, sequence.launched):
                found = self.pages[group][table[at // self.size]][at % self.size]
                assert found == sequence.expected[at], f"group {group}: position {at} of {sequence.launched} is wrong"

    def _verify_state(self, sequence: FakeSequence) -> None:
        """Check that the state before the next token is that of the last launched token."""
        for group, window in enumerate(self.windows):
            if window == STATE and sequence.launched:
                page = int(self.kv.tables[group, sequence.slot, (sequence.launched - 1) // self.size])
                assert page < len(self.pages[group]), f"no state is kept at position {sequence.launched}"
                found = self.pages[group][page][0]
                assert found == sequence.expected[sequence.launched - 1], f"the state at {sequence.launched} is wrong"


def check_order(kv: KVManager) -> None:
    """Check in groups without a window that each cached page has a cached parent, which is evicted later."""
    for group in (group for group, window in enumerate(kv.config.windows) if window is None):
        pool = kv._store.pools[group]
        order = {page: index for index, page in enumerate(pool._cached)}
        for node in kv._store.tree.nodes():
            if node.pages[group] < 0 or node.parent.parent is None:
                continue
            above, below = node.parent.pages[group], node.pages[group]
            assert above >= 0, f"page {below} cannot be found without the one above it"
            assert above not in order or order.get(below, len(order)) < order[above], f"{above} goes before {below}"
