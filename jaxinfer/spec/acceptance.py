"""Whether drafts pay: of one sequence by what was accepted, of all by what was measured. No jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

WORTH = 0.1
"""A draft token is fed where it is accepted with this probability at least: its row would be idle."""
WORTH_OF_A_PASS = 0.25
"""The same of a token for which a draft model runs once more, at a fifth of a step's time."""
_REST = 16
"""Plans without drafts of a sequence whose drafts fail; twice as many each time."""
_MEMORY = 0.8
"""Weight of what was seen before, at each new draft or step."""
_SECONDS_MEMORY = 0.97
"""The same for the seconds of steps, which differ more."""
_TOKENS_MEMORY = 0.99
"""The same for their tokens: a sequence's come in bursts."""
_PROBE = 24
"""Steps with drafts that tell whether they would pay."""
_PLAIN = 4
"""Steps without them that tell what such a step costs."""
_EVERY = 128
"""Steps with drafts that pay before a look at the others; steps without drafts that do not pay before a new try. Four
times as many after each one in vain: a new try costs what a drafter has missed."""
_LONGEST = 2048
"""The same after several tries in vain."""
_GAIN = 1.1
"""Drafts begin where they bring so much of the tokens a second that there would be without. Figures of few steps are
some percent off, and what is lost by wrong ones counts more than what little gains bring."""
_LOSS = 1.0
"""They go on where they bring so much."""
_PLAIN_LOSS = 0.9
"""Where they bring less than this it is not waited for the next look: first all sequences draft, then few are left for
whom the others wait."""


@dataclasses.dataclass(slots=True)
class Mean:
    """A mean in which what was seen before fades."""

    memory: float
    value: float = 0.0
    weight: float = 0.0
    steps: int = 0

    def note(self, value: float) -> None:
        self.steps += 1
        self.weight = self.memory * self.weight + 1
        self.value += (value - self.value) / self.weight


class Tempo:
    """Whether steps with drafts bring more tokens a second than steps without, as measured, for each load: what a
    step with drafts costs, and whose drafts it has, differ between one sequence and many.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._loads = clock, dict[int, _Load]()
        self._last: tuple[int, bool, float] | None = None

    def drafts(self, sequences: int) -> bool:
        """Whether the next step of so many sequences shall have drafts."""
        return self._load(sequences).drafts

    def rests(self, sequences: int) -> bool:
        """Whether it has none because they have not paid."""
        return self._load(sequences).rests

    def wake(self, sequences: int) -> None:
        """End a rest: a draft would have come true."""
        self._load(sequences).wake()

    def note(self, sequences: int, drafted: bool, tokens: float | None) -> None:
        """Note a step that was read. ``tokens`` of a sequence; None: not to be compared, prompts were computed too."""
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
    """Steps of about so many sequences: the seconds of either kind, and the tokens of those with drafts. The other kind
    is tried now and then, ever more seldom while drafts do not pay."""

    drafts: bool = True
    rests: bool = False  # drafts have not paid
    _seconds: dict[bool, Mean] = dataclasses.field(
        default_factory=lambda: {kind: Mean(_SECONDS_MEMORY) for kind in (True, False)}
    )
    _tokens: Mean = dataclasses.field(default_factory=lambda: Mean(_TOKENS_MEMORY))
    _goes_on: bool = False  # drafts have paid
    _left: int = _PROBE  # steps of this kind
    _rest: int = _EVERY  # steps of the next rest

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
        """Choose the kind of the next steps, and of how many: a run with drafts, a few without, and a verdict."""
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
        """Tokens a second with drafts over those without."""
        return self._tokens.value * self._seconds[False].value / self._seconds[True].value


@dataclasses.dataclass(slots=True)
class Acceptance:
    """Share of a sequence's drafts that came true: each token is accepted with the same probability, the rest of a
    draft fails with it."""

    accepted: float = 2.0
    failed: float = 0.5
    resume: int = 0  # the plan from which on there are drafts again
    rest: int = _REST

    @property
    def rate(self) -> float:
        return self.accepted / (self.accepted + self.failed)

    def depth(self, worth: float = WORTH) -> int:
        """Tokens of a draft that are accepted with a probability of ``worth`` at least."""
        rate = self.rate
        return 1 << 30 if rate >= 1 else int(math.log(worth) / math.log(rate))

    def note(self, accepted: int, failed: int, plan: int) -> None:
        """Note a draft. ``failed``: whether a token of it did (1) or not (0)."""
        self.accepted = _MEMORY * self.accepted + accepted
        self.failed = _MEMORY * self.failed + failed
        if self.depth():
            self.rest = _REST if accepted else self.rest
            return
        self.resume, self.rest = plan + self.rest, min(2 * self.rest, 64 * _REST)
        self.accepted, self.failed = 0.3, 0.7  # one token at a time, until one comes true
