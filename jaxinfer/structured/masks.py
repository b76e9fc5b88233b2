"""Token masks of sequences, computed in helper processes concurrently with the engine's steps. No jax."""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from jaxinfer.helper_process import Helper
from jaxinfer.structured.answers import STOPPED, UNAVAILABLE, Answer, Ask, Item
from jaxinfer.structured.helper import MODULE, setup
from jaxinfer.structured.matcher import Vocabulary

CPU_SECONDS = 1.0
"""CPU seconds for a grammar and its mask, or for a mask."""
_WALL_SECONDS = 60.0  # for a helper that waits without using the CPU
_LONG_SECONDS = 0.002
"""Seconds for masks of known grammars: ten times the usual. A slower helper gets idle priority, as do helpers that
compile a grammar: the engine's steps come first."""
_QUICK_SECONDS = 0.02
"""Largest burden (`Answer.burden`) of a quick grammar."""
_REMEMBERED = 4096
_PAUSES = (0.1, 0.3, 1.0)
"""Seconds between attempts to start a helper."""
_log = logging.getLogger(__name__)
_TOO_LONG = "the grammar took too long, or too much memory: its helper was stopped"


class Held:
    """Grammar state of a sequence, used by the engine's thread only.

    Attributes:
        ready: the reply to the last request has arrived.
        masks: allowed tokens as int32 words: for the next token, and after each of the forced ones.
        forced: forced tokens, as a model would tokenise the text.
        stopped: the output is complete.
        error: reason why there will be no mask.
        late: a wait for the mask timed out.
        slow: its last mask took long: waiting for the next is useless.
        burden: burden of the last reply.
        owner: worker that computes its masks; replies of other workers are stale, and dropped.
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
        self.generation, self.told = -1, 0  # generation of the helper that knows it, and number of tokens sent

    @property
    def mask(self) -> np.ndarray | None:
        """Mask of the next token; None: not available yet, or never."""
        return self.masks[0] if self.ready and self.masks else None

    def say(self, tokens: Iterable[int]) -> bool:
        """Append generated tokens; return whether the next mask is known: they were forced, and the reply has it."""
        new = list(tokens)
        self.said += new
        if self.ready and new == self.forced[: len(new)]:
            self.forced, self.masks = self.forced[len(new) :], self.masks[len(new) :]
        else:
            self.ready = False
        self.late = False
        return self.ready

    def hear(self, worker: _Worker | None, answer: Answer, words: int) -> None:
        """Take a helper's reply."""
        if self.owner is not worker or self.told < len(self.said):
            return  # it has moved or advanced since, and is requested again
        self.stopped = answer.state == STOPPED
        self.error = None if self.stopped else answer.state
        self.masks, self.forced = [_mask_of(each, words) for each in answer.masks], answer.tokens
        self.ready, self.slow, self.burden = True, answer.slow, answer.burden

    @property
    def key(self) -> int:
        """Hash of its grammar and scope."""
        return hash(self.grammar)


class Masks:
    """Token masks for the sequences of an engine. The first sequence with a grammar starts the helpers.

    Only `wait` and `wait_any` block. A helper that takes too long, or too much memory, is killed and replaced; the
    sequence that caused it gets an error, and the other sequences of this helper are late.

    Slow grammars do not delay quick ones: one helper compiles new grammars; quick grammars then move to the quick
    helpers, which compute masks of all their sequences at once, the rest to the slow helper. New and slow grammars are
    processed one sequence at a time, round-robin between scopes (tenants).

    Args:
        vocabulary: called once, by a thread; None: no sequence has a grammar.
        helpers: processes for quick grammars; 0: no sequence has a grammar.
        ahead: maximum forced tokens for which masks are computed ahead.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary] | None, helpers: int, ahead: int = 0) -> None:
        self._came, self._workers = threading.Condition(), list[_Worker]()
        self.helpers = 0 if vocabulary is None else helpers
        if vocabulary is not None and helpers:
            once = functools.cache(vocabulary)
            self._workers = [_Worker(once, self._came, ahead) for _ in range(helpers)]
            self._workers += [_Worker(once, self._came, ahead, in_turn=True) for _ in ("new", "slow")]
        self._numbers = itertools.count()
        self._known = collections.OrderedDict[int, bool]()  # whether a grammar is quick, by key
        weakref.finalize(self, _stop, self._workers)

    def open(self, kind: str, text: str, scope: str = "") -> Held:
        """Begin an output constrained by a grammar; the next `send` requests its first mask."""
        held = Held(next(self._numbers), (kind, text, scope))
        self._give(held, self._worker_of(self._known.get(held.key)))
        return held

    def advance(self, held: Held, tokens: Iterable[int]) -> None:
        """Append generated tokens; the next `send` requests the next mask."""
        with self._came:  # a reply may arrive concurrently
            was_ready, ready = held.ready, held.say(tokens)
            if was_ready:
                self._sort(held)
        if not ready:
            _owner(held).waiting[held] = None

    def _sort(self, held: Held) -> None:
        """Move a sequence to the worker for grammars of its speed."""
        worker, owner = self._worker_of(self._note(held)), _owner(held)
        if worker.in_turn != owner.in_turn or (worker.in_turn and worker is not owner):
            self._take(held)
            held.generation = -1
            self._give(held, worker)

    def _note(self, held: Held) -> bool:
        """Record whether a grammar is quick, by its last reply; a grammar that was slow once stays slow."""
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
        """Drop a sequence."""
        if held.ready:
            self._note(held)
        self._take(held)

    def _take(self, held: Held) -> None:
        worker = _owner(held)
        worker.members -= 1
        worker.ended.append(held.number)

    def send(self) -> None:
        """Send all requests made since the last call; deprioritise or kill helpers that take too long."""
        for worker in self._workers:
            worker.send()

    def wait(self, those: Sequence[Held], seconds: float) -> None:
        """Wait until all of these are ready, at most ``seconds``. The rest are late."""
        with self._came:
            self._came.wait_for(lambda: all(each.ready for each in those), seconds)
        for each in those:
            each.late = not each.ready

    def wait_any(self, those: Sequence[Held], seconds: float) -> None:
        """Wait until one of these is ready, at most ``seconds``."""
        with self._came:
            self._came.wait_for(lambda: any(each.ready for each in those), seconds)


def _owner(held: Held) -> _Worker:
    assert held.owner is not None  # set by `Masks.open`
    return held.owner


def _mask_of(allowed: list[int] | bytes, words: int) -> np.ndarray:
    """Return a mask as int32 words. ``allowed``: its tokens or its bits."""
    if isinstance(allowed, bytes):
        return np.frombuffer(allowed, np.int32)
    mask, at = np.zeros(words, np.uint32), np.array(allowed, np.uint32)
    np.bitwise_or.at(mask, at >> 5, np.uint32(1) << (at & 31))
    return mask.view(np.int32)


def only(token: int) -> np.ndarray:
    """Return the mask that allows one token. Its missing words count as 0."""
    return _mask_of([token], (token >> 5) + 1)


def _stop(workers: Iterable[_Worker]) -> None:
    for worker in workers:
        worker.stop()


class _Worker:
    """A helper, and the thread that calls it. ``waiting``, ``ended`` and ``members`` belong to the engine's thread."""

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], came: threading.Condition, ahead: int, *, in_turn: bool = False
    ) -> None:
        self._vocabulary, self._came, self._ahead = vocabulary, came, ahead
        self.in_turn = in_turn
        self.members, self.waiting, self.ended = 0, dict[Held, None](), list[int]()
        self._sent = threading.Condition()
        self._ask, self._end = list[Held](), list[int]()
        self._turns = collections.OrderedDict[str, None]()  # scopes, least recently served first
        self._helper: Helper | None = None
        self._thread: threading.Thread | None = None
        self._generation, self._words, self._since = 0, 0, 0.0
        self._hurried = self._stopped = False

    def send(self) -> None:
        since = self._since  # read once: a reply that arrives now sets it to 0
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
        except RuntimeError as cause:  # the system's thread limit
            _log.warning("no thread for grammars: %s", cause)
            with self._sent:
                ask, self._ask = self._ask, []
            self._tell(ask, UNAVAILABLE)
        else:
            self._thread = thread

    def _hurry(self, helper: Helper, seconds: float) -> None:
        """Deprioritise or kill a helper whose current request was sent ``seconds`` ago."""
        if seconds > _WALL_SECONDS:
            helper.kill()
        elif seconds > (_LONG_SECONDS if self.in_turn else _QUICK_SECONDS) and not self._hurried:
            self._hurried = True
            helper.lower_priority()

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
        """Return the next requests: all, or with ``in_turn`` one of the scope that was served least recently."""
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
            for each in ask:  # one at a time, to find the grammar that caused it
                self._answer([each], [])
        elif answer is None:
            self._tell(ask, _TOO_LONG)
        else:
            self._hear(ask, msgspec.msgpack.decode(answer, type=list[Answer]))

    def _tell(self, ask: list[Held], state: str) -> None:
        with self._came:
            for held in self._own(ask):
                held.told = len(held.said)  # so that it is not requested again
        burden = CPU_SECONDS if state == _TOO_LONG else 0.0
        self._hear(ask, [Answer(state, [], [], burden=burden)] * len(ask))

    def _hear(self, ask: list[Held], states: list[Answer]) -> None:
        with self._came:
            for held, state in zip(ask, states, strict=True):
                held.hear(self, state, self._words)
            self._came.notify_all()

    def _start(self) -> bool:
        """Start the helper if it is not running, with a few attempts. False: the machine lacks resources."""
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
        """Return those that have not moved to another worker. Needs the lock of `_came`, under which they move."""
        return [held for held in ask if held.owner is self]

    def _asked(self, ask: list[Held], end: list[int]) -> tuple[list[Held], bytes | None]:
        """Request masks for those of these sequences that this worker owns, with grammars new to the helper; the reply
        is None if the helper was killed or died."""
        assert self._helper is not None
        with self._came:
            ask = self._own(ask)
            items = [self._item(held) for held in ask]
        self._hurried = self.in_turn and any(grammar is not None for _, grammar, _ in items)  # it does so itself
        self._since = time.monotonic()
        answer = self._helper.ask(msgspec.msgpack.encode(Ask(items, end, not self.in_turn)))
        self._since = 0.0
        return ask, answer

    def _item(self, held: Held) -> Item:
        """Return the request for a matcher: the new tokens, or for an unknown one the grammar and all tokens."""
        known = held.generation == self._generation
        first, last = held.told if known else 0, len(held.said)  # the engine's thread may append concurrently
        held.generation, held.told = self._generation, last
        return held.number, None if known else held.grammar, held.said[first:last]
