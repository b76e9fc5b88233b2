"""Decisions whether to draft: per sequence by acceptance rate, per load by measured throughput. No jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

WORTH = 0.1
"""Minimum acceptance probability at which a draft token is fed: its row would be idle."""
WORTH_OF_A_PASS = 0.25
"""Minimum acceptance probability of a token for which a draft model runs once more, at a fifth of a step's time."""
_REST = 16
"""Plans without drafts for a sequence after its drafts fail; doubled each time."""
_MEMORY = 0.8
"""Decay of past observations at each new draft or step."""
_SECONDS_MEMORY = 0.97
"""Decay for the seconds of steps, which vary more."""
_TOKENS_MEMORY = 0.99
"""Decay for tokens per step: the tokens of a sequence come in bursts."""
_PROBE = 24
"""Steps with drafts that measure whether drafting pays."""
_PLAIN = 4
"""Steps without drafts that measure the cost of such a step."""
_EVERY = 128
"""Steps with drafts that pay before the other kind is measured; steps without drafts before a new try. Four times as
many after each failed try: a try costs what the drafter has missed."""
_LONGEST = 2048
"""Maximum steps without drafts after several failed tries."""
_GAIN = 1.1
"""Ratio of tokens per second, with over without drafts, at which drafting begins. Estimates from few steps are some
percent off, and wrong decisions lose more than small gains bring."""
_LOSS = 1.0
"""Ratio at or above which drafting continues."""
_PLAIN_LOSS = 0.9
"""Ratio below which drafting stops before the next comparison: at first all sequences draft, later few do and the other
sequences wait for them."""


@dataclasses.dataclass(slots=True)
class Mean:
    """Exponentially decaying mean."""

    memory: float
    value: float = 0.0
    weight: float = 0.0
    steps: int = 0

    def note(self, value: float) -> None:
        self.steps += 1
        self.weight = self.memory * self.weight + 1
        self.value += (value - self.value) / self.weight


class ThroughputMonitor:
    """Measures for each load whether steps with drafts bring more tokens per second than steps without: the cost of a
    step with drafts, and the sequences that draft, depend on the number of sequences.

    Args:
        clock: clock in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._loads = clock, dict[int, _Load]()
        self._last: tuple[int, bool, float] | None = None

    def drafts(self, sequences: int) -> bool:
        """Whether the next step of ``sequences`` sequences should have drafts."""
        return self._load(sequences).drafts

    def rests(self, sequences: int) -> bool:
        """Whether drafting is paused because it has not paid."""
        return self._load(sequences).rests

    def wake(self, sequences: int) -> None:
        """End a pause: a draft would have been accepted."""
        self._load(sequences).wake()

    def note(self, sequences: int, drafted: bool, tokens: float | None) -> None:
        """Record a step that was read. ``tokens`` per sequence; None: not comparable, prompts were computed too."""
        now, last, size = self._clock(), self._last, sequences.bit_length()
        self._last = None if tokens is None else (size, drafted, now)
        if tokens is not None and last is not None and last[:2] == (size, drafted):
            self._load(sequences).note(drafted, now - last[2], tokens)

    def _load(self, sequences: int) -> _Load:
        size = sequences.bit_length()
        if size not in self._loads:
            self._loads[size] = _Load()
        return self._loads[size]


@dataclasses.dataclass(slots=True)
class _Load:
    """Statistics of steps of similar batch size: the seconds of both kinds, and the tokens of steps with drafts. The
    other kind is tried now and then, less often while drafts do not pay."""

    drafts: bool = True
    rests: bool = False  # drafts have not paid
    _seconds: dict[bool, Mean] = dataclasses.field(
        default_factory=lambda: {kind: Mean(_SECONDS_MEMORY) for kind in (True, False)}
    )
    _tokens: Mean = dataclasses.field(default_factory=lambda: Mean(_TOKENS_MEMORY))
    _goes_on: bool = False  # drafts have paid
    _left: int = _PROBE  # remaining steps of this kind
    _rest: int = _EVERY  # steps of the next pause

    def note(self, drafted: bool, seconds: float, tokens: float) -> None:
        if drafted != self.drafts:
            return  # it was planned before the choice
        self._seconds[drafted].note(seconds)
        if drafted:
            self._tokens.note(tokens)
        self._left -= 1
        if self._left <= 0 or (drafted and self._tokens.steps > _PROBE and self._brings() < _PLAIN_LOSS):
            self._choose()

    def wake(self) -> None:
        if self.rests:
            self.drafts, self._left, self.rests, self._tokens = True, _PROBE, False, Mean(_TOKENS_MEMORY)

    def _choose(self) -> None:
        """Choose the kind and the number of the next steps: a run with drafts, a few steps without, then a decision."""
        if self.drafts:
            self.drafts, self._left = False, _PLAIN
        elif self.rests:
            self.wake()
        elif self._brings() >= (_LOSS if self._goes_on else _GAIN):
            self.drafts, self._goes_on, self._left, self._rest = True, True, _EVERY, _EVERY
        else:
            self._goes_on, self.rests = False, True
            self._left, self._rest = self._rest, min(4 * self._rest, _LONGEST)

    def _brings(self) -> float:
        """Return tokens per second with drafts over those without."""
        return self._tokens.value * self._seconds[False].value / self._seconds[True].value


@dataclasses.dataclass(slots=True)
class Acceptance:
    """Acceptance rate of a sequence's drafts: each token is accepted with the same probability, and the tokens after a
    rejected one fail with it."""

    accepted: float = 2.0
    failed: float = 0.5
    resume: int = 0  # the plan from which on there are drafts again
    rest: int = _REST

    @property
    def rate(self) -> float:
        return self.accepted / (self.accepted + self.failed)

    def depth(self, worth: float = WORTH) -> int:
        """Return the draft depth up to which a token is accepted with a probability of at least ``worth``."""
        rate = self.rate
        return 1 << 30 if rate >= 1 else int(math.log(worth) / math.log(rate))

    def note(self, accepted: int, failed: int, plan: int) -> None:
        """Record a draft. ``failed``: whether a token of it was rejected (1) or not (0)."""
        self.accepted = _MEMORY * self.accepted + accepted
        self.failed = _MEMORY * self.failed + failed
        if self.depth():
            self.rest = _REST if accepted else self.rest
            return
        self.resume, self.rest = plan + self.rest, min(2 * self.rest, 64 * _REST)
        self.accepted, self.failed = 0.3, 0.7  # one token at a time, until one is accepted
