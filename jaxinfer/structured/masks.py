"""The masks of sequences, computed beside the engine's steps in helper processes. No jax."""

from __future__ import annotations

import collections
import functools
import itertools
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from jaxinfer.helper_process import Helper
from jaxinfer.structured.answers import STOPPED, UNAVAILABLE, Answer
from jaxinfer.structured.helper import MODULE, Item, setup
from jaxinfer.structured.helper import ask as ask_for
from jaxinfer.structured.matcher import Vocabulary

CPU_SECONDS = 1.0
"""Of the processor, for a grammar and its mask, or a mask."""
_WALL_SECONDS = 60.0  # for one that waits, and uses no processor
_LONG_SECONDS = 0.002
"""For masks of known grammars: ten times what they take. Who takes longer stands back, as helpers do that learn one:
the processor is the steps' first."""
_QUICK_SECONDS = 0.02
"""The burden (`Answer.burden`) up to which a grammar is quick."""
_REMEMBERED = 4096
_PAUSES = (0.1, 0.3, 1.0)
"""Seconds between attempts to start a helper."""
_log = logging.getLogger(__name__)
_TOO_LONG = "the grammar took too long, or too much memory: its helper was stopped"


class Held:
    """A sequence's place in its grammar. It belongs to the engine's thread.

    Attributes:
        ready: the answer to what was last asked is there.
        masks: the tokens that may follow, as int32 words: next, and behind each of those that are forced.
        forced: the text that must follow, as models would say it.
        stopped: the output is whole.
        error: why there will be no mask.
        late: it was waited for, and was not there in time.
        slow: its last mask took long: to wait for the next is no use.
        burden: of the last answer.
        owner: the worker that is asked for its masks; others' answers are of before, and dropped.
    """

    __slots__ = (
        "burden",
        "error",
        "forced",
        "generation",
        "grammar",
        "late",
        "masks",
        "number",
        "owner",
        "ready",
        "said",
        "slow",
        "stopped",
        "told",
    )

    def __init__(self, number: int, grammar: tuple[str, str, str]) -> None:
        self.number, self.grammar = number, grammar
        self.said: list[int] = []
        self.ready = self.stopped = self.late = self.slow = False
        self.masks: list[np.ndarray] = []
        self.forced: list[int] = []
        self.error: str | None = None
        self.burden = 0.0
        self.owner: _Worker | None = None
        self.generation, self.told = -1, 0  # of the helper that knows it, and how much of what was said

    @property
    def mask(self) -> np.ndarray | None:
        """Of the next token; None: there is none yet, or there will be none."""
        return self.masks[0] if self.ready and self.masks else None

    def say(self, tokens: Iterable[int]) -> bool:
        """Note what was said; whether its mask is there: it was what is forced, and there is one behind it."""
        new = list(tokens)
        self.said += new
        if self.ready and new == self.forced[: len(new)]:
            self.forced, self.masks = self.forced[len(new) :], self.masks[len(new) :]
        else:
            self.ready = False
        self.late = False
        return self.ready

    def hear(self, worker: _Worker | None, answer: Answer, masks: Iterator[np.ndarray], words: int) -> None:
        """Take a helper's answer. ``masks``: those that are not in the answer."""
        found = [next(masks) if ids is None else _mask_of(ids, words) for ids in answer.masks]
        if self.owner is not worker or self.told < len(self.said):
            return  # it has moved or gone on since, and is asked again
        self.stopped = answer.state == STOPPED
        self.error = None if self.stopped else answer.state
        self.masks, self.forced, self.ready, self.slow = found, answer.tokens, True, answer.slow
        self.burden = answer.burden

    @property
    def key(self) -> int:
        """Of its grammar and whose it is."""
        return hash(self.grammar)


class Masks:
    """Masks for the sequences of an engine. Its helpers are started by the first of them.

    Nothing here waits but `wait`. A helper that takes too long, or too much memory, is killed and replaced; the one
    whose grammar it was has an error then, and the others of this helper are late.

    Slow grammars do not delay quick ones: one helper compiles new grammars; those that turn out quick move to the
    quick helpers, which are asked for all their sequences at once, the others to the slow helper. New and slow ones
    are asked for one sequence at a time, and scopes (tenants) take turns.

    Args:
        vocabulary: asked for once, by a thread; None: no sequence has a grammar.
        helpers: processes for quick grammars; 0: no sequence has a grammar.
        ahead: tokens of a text that must follow, of which the masks are asked, too.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary] | None, helpers: int, ahead: int = 0) -> None:
        self._came, self._workers = threading.Condition(), list[_Worker]()
        self.helpers = 0 if vocabulary is None else helpers
        if vocabulary is not None and helpers:
            once = functools.cache(vocabulary)
            self._workers = [_Worker(once, self._came, ahead) for _ in range(helpers)]
            self._workers += [_Worker(once, self._came, ahead, in_turn=True) for _ in ("new", "slow")]
        self._numbers = itertools.count()
        self._known = collections.OrderedDict[int, bool]()  # grammars by whether they are quick
        weakref.finalize(self, _stop, self._workers)

    def open(self, kind: str, text: str, scope: str = "") -> Held:
        """Begin an output in a grammar; its first mask is on its way with the next `send`."""
        held = Held(next(self._numbers), (kind, text, scope))
        self._give(held, self._worker_of(self._known.get(held.key)))
        return held

    def advance(self, held: Held, tokens: Iterable[int]) -> None:
        """Note what the sequence has said; its next mask is on its way with the next `send`."""
        with self._came:  # an answer may be coming in
            was_ready, ready = held.ready, held.say(tokens)
            if was_ready:
                self._sort(held)
        if not ready:
            _owner(held).waiting[held] = None

    def _sort(self, held: Held) -> None:
        """Move a sequence to where grammars are that take as long as its own."""
        worker, owner = self._worker_of(self._note(held)), _owner(held)
        if worker.in_turn != owner.in_turn or (worker.in_turn and worker is not owner):
            self._take(held)
            held.generation = -1
            self._give(held, worker)

    def _note(self, held: Held) -> bool:
        """Remember whether a grammar is quick, by its last answer; one that was slow once may be so again."""
        is_quick = held.burden < _QUICK_SECONDS and self._known.get(held.key, True)
        self._known[held.key] = is_quick
        self._known.move_to_end(held.key)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return is_quick

    def _worker_of(self, is_quick: bool | None) -> _Worker:
        *quick, new, slow = self._workers
        if is_quick is None:
            return new
        return min(quick, key=lambda each: each.members) if is_quick else slow

    def _give(self, held: Held, worker: _Worker) -> None:
        worker.members += 1
        held.owner = worker
        if not held.ready:
            worker.waiting[held] = None

    def close(self, held: Held) -> None:
        """Forget a sequence."""
        if held.ready:
            self._note(held)
        self._take(held)

    def _take(self, held: Held) -> None:
        worker = _owner(held)
        worker.members -= 1
        worker.ended.append(held.number)

    def send(self) -> None:
        """Send all that was noted since the last call on its way; end what has waited for too long."""
        for worker in self._workers:
            worker.send()

    def wait(self, those: Sequence[Held], seconds: float) -> None:
        """Wait until all of these are ready, so long at most. What is not is late."""
        with self._came:
            self._came.wait_for(lambda: all(each.ready for each in those), seconds)
        for each in those:
            each.late = not each.ready

    def wait_any(self, those: Sequence[Held], seconds: float) -> None:
        """Wait until one of these is ready, so long at most."""
        with self._came:
            self._came.wait_for(lambda: any(each.ready for each in those), seconds)


def _owner(held: Held) -> _Worker:
    assert held.owner is not None  # `Masks.open` made it
    return held.owner


def _mask_of(ids: list[int], words: int) -> np.ndarray:
    """The mask of these tokens."""
    mask, at = np.zeros(words, np.uint32), np.array(ids, np.uint32)
    np.bitwise_or.at(mask, at >> 5, np.uint32(1) << (at & 31))
    return mask.view(np.int32)


def _stop(workers: Iterable[_Worker]) -> None:
    for worker in workers:
        worker.stop()


class _Worker:
    """A helper, and the thread that asks it. ``waiting``, ``ended`` and ``members`` belong to the engine's thread."""

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], came: threading.Condition, ahead: int, *, in_turn: bool = False
    ) -> None:
        self._vocabulary, self._came, self._ahead = vocabulary, came, ahead
        self.in_turn = in_turn
        self.members, self.waiting, self.ended = 0, dict[Held, None](), list[int]()
        self._sent = threading.Condition()
        self._ask, self._end = list[Held](), list[int]()
        self._turns = collections.OrderedDict[str, None]()  # scopes, the last one that had its turn at the end
        self._helper: Helper | None = None
        self._thread: threading.Thread | None = None
        self._generation, self._words, self._since = 0, 0, 0.0
        self._hurried = self._stopped = False

    def send(self) -> None:
        since = self._since  # once: an answer that comes now sets it to 0
        if since and self._helper is not None:
            self._hurry(self._helper, time.monotonic() - since)
        if not self.waiting and not self.ended:
            return
        with self._sent:
            waiting = dict.fromkeys((*self._ask, *self.waiting))
            self._ask = [held for held in waiting if held.number not in self.ended]
            self._end += self.ended
            self.waiting, self.ended = {}, []
            self._sent.notify()
        if self._thread is None:
            self._start_thread()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="jaxinfer-masks", daemon=True)
        try:
            thread.start()
        except RuntimeError as cause:  # as many as there may be
            _log.warning("no thread for grammars: %s", cause)
            with self._sent:
                ask, self._ask = self._ask, []
            self._tell(ask, UNAVAILABLE)
        else:
            self._thread = thread

    def _hurry(self, helper: Helper, seconds: float) -> None:
        """See to a helper that has been asked ``seconds`` ago."""
        if seconds > _WALL_SECONDS:
            helper.kill()
        elif seconds > (_LONG_SECONDS if self.in_turn else _QUICK_SECONDS) and not self._hurried:
            self._hurried = True
            helper.stand_back()

    def stop(self) -> None:
        with self._sent:
            self._stopped = True
            self._sent.notify()
        if self._helper is not None:
            self._helper.kill()

    def _run(self) -> None:
        while not self._stopped:
            with self._sent:
                self._sent.wait_for(lambda: self._ask or self._stopped)
                ask, end = self._next(), self._end
                self._end = []
            if not self._stopped:
                self._answer(ask, end)

    def _next(self) -> list[Held]:
        """What is asked next: all, or in turn one of the scope that has waited longest for its turn."""
        if not self.in_turn or not self._ask:
            ask, self._ask = self._ask, []
            return ask
        waiting = dict[str, Held]()
        for held in self._ask:
            waiting.setdefault(held.grammar[2], held)
        scope = next((each for each in waiting if each not in self._turns), None)
        if scope is None:
            scope = next(each for each in self._turns if each in waiting)
        self._turns[scope] = None
        self._turns.move_to_end(scope)
        if len(self._turns) > _REMEMBERED:
            self._turns.popitem(last=False)
        self._ask.remove(waiting[scope])
        return [waiting[scope]]

    def _answer(self, ask: list[Held], end: list[int]) -> None:
        if not self._start():
            self._end += end
            self._tell(ask, UNAVAILABLE)
            return
        ask, answer = self._asked(ask, end)
        if answer is None and len(ask) > 1 and not self._stopped:
            for each in ask:  # whose grammar it was shows when each is asked by itself
                self._answer([each], [])
        elif answer is None:
            self._tell(ask, _TOO_LONG)
        else:
            head, _, masks = answer.partition(b"\n")
            self._hear(ask, [Answer(*each) for each in json.loads(head)], masks)

    def _tell(self, ask: list[Held], state: str) -> None:
        with self._came:
            for held in self._own(ask):
                held.told = len(held.said)  # it is not asked for again
        burden = CPU_SECONDS if state == _TOO_LONG else 0.0
        self._hear(ask, [Answer(state, [], [], burden=burden)] * len(ask), b"")

    def _hear(self, ask: list[Held], states: list[Answer], masks: bytes) -> None:
        rows = iter(np.frombuffer(masks, np.int32).reshape(-1, max(1, self._words)))
        with self._came:
            for held, state in zip(ask, states, strict=True):
                held.hear(self, state, rows, self._words)
            self._came.notify_all()

    def _start(self) -> bool:
        """Start the helper if it does not run, at a few attempts. False: the machine has not what it takes now."""
        for pause in (*_PAUSES, None):
            try:
                if self._helper is None:
                    vocabulary = self._vocabulary()
                    self._words = vocabulary.words
                    self._helper = Helper(MODULE, setup(CPU_SECONDS, vocabulary, self._ahead))
                if self._helper.start():
                    self._generation += 1
            except (OSError, RuntimeError, MemoryError) as cause:
                if pause is None:
                    _log.warning("a helper for grammars does not start: %s", cause)
                    break
                time.sleep(pause)
                if self._stopped:
                    break
            else:
                return True
        return False

    def _own(self, ask: list[Held]) -> list[Held]:
        """Those that have not moved to another worker since. Under the lock of `_came`, as they move."""
        return [held for held in ask if held.owner is self]

    def _asked(self, ask: list[Held], end: list[int]) -> tuple[list[Held], bytes | None]:
        """Ask the helper, which learns the grammars that it does not know, for its own sequences among these; the
        answer is None if it was killed, or died."""
        assert self._helper is not None
        with self._came:
            ask = self._own(ask)
            items = [self._item(held) for held in ask]
        self._hurried = self.in_turn and any(grammar is not None for _, grammar, _ in items)  # it stands back by itself
        self._since = time.monotonic()
        answer = self._helper.ask(ask_for(items, end, quick=not self.in_turn))
        self._since = 0.0
        return ask, answer

    def _item(self, held: Held) -> Item:
        """What a matcher is asked: one that the helper knows is told what is new, another one all."""
        known = held.generation == self._generation
        first, last = held.told if known else 0, len(held.said)  # the engine's thread may add to it
        held.generation, held.told = self._generation, last
        return held.number, None if known else held.grammar, held.said[first:last]
