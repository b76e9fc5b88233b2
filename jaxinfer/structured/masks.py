"""The masks of sequences, computed beside the engine's steps in helper processes. No jax."""

from __future__ import annotations

import functools
import itertools
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from jaxinfer.helper_process import Helper
from jaxinfer.structured.answers import STOPPED, Answer
from jaxinfer.structured.helper import MODULE, Item, setup
from jaxinfer.structured.helper import ask as ask_for
from jaxinfer.structured.matcher import Vocabulary

CPU_SECONDS = 1.0
"""Of the processor, for a grammar and its mask, or a mask."""
_WALL_SECONDS = 60.0  # for one that waits, and uses no processor
_LONG_SECONDS = 0.002
"""For masks of known grammars: ten times what they take. Who takes longer stands back, as helpers do that learn one:
the processor is the steps' first."""
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
    """

    __slots__ = (
        "__weakref__",
        "error",
        "forced",
        "generation",
        "grammar",
        "late",
        "masks",
        "number",
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

    def hear(self, answer: Answer, masks: Iterator[np.ndarray], words: int) -> None:
        """Take what the helper says. ``masks``: those that are not in the answer."""
        found = [next(masks) if ids is None else _mask_of(ids, words) for ids in answer.masks]
        if self.told < len(self.said):
            return  # it has gone on since, and is asked again
        self.stopped = answer.state == STOPPED
        self.error = None if self.stopped else answer.state
        self.masks, self.forced, self.ready, self.slow = found, answer.tokens, True, answer.slow


class Masks:
    """Masks for the sequences of an engine. Its helpers are started by the first of them.

    Nothing here waits but `wait`. A helper that takes too long, or too much memory, is killed and replaced; the one
    whose grammar it was has an error then, and the others of this helper are late.

    Args:
        vocabulary: asked for once, by a thread; None: no sequence has a grammar.
        helpers: processes; 0: the same.
        ahead: tokens of a text that must follow, of which the masks are asked, too.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary] | None, helpers: int, ahead: int = 0) -> None:
        self._came, self._workers = threading.Condition(), list[_Worker]()
        if vocabulary is not None:
            once = functools.cache(vocabulary)
            self._workers = [_Worker(once, self._came, ahead) for _ in range(helpers)]
        self._numbers = itertools.count()
        self._owners = weakref.WeakKeyDictionary[Held, _Worker]()
        weakref.finalize(self, _stop, self._workers)

    @property
    def helpers(self) -> int:
        return len(self._workers)

    def open(self, kind: str, text: str, scope: str = "") -> Held:
        """Begin an output in a grammar; its first mask is on its way with the next `send`."""
        held = Held(next(self._numbers), (kind, text, scope))
        worker = min(self._workers, key=lambda each: each.members)
        worker.members += 1
        self._owners[held] = worker
        worker.waiting[held] = None
        return held

    def advance(self, held: Held, tokens: Iterable[int]) -> None:
        """Note what the sequence has said; its next mask is on its way with the next `send`."""
        with self._came:  # an answer may be coming in
            ready = held.say(tokens)
        if not ready:
            self._owners[held].waiting[held] = None

    def close(self, held: Held) -> None:
        """Forget a sequence."""
        worker = self._owners.pop(held)
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

    def __init__(self, vocabulary: Callable[[], Vocabulary], came: threading.Condition, ahead: int) -> None:
        self._vocabulary, self._came, self._ahead = vocabulary, came, ahead
        self.members, self.waiting, self.ended = 0, dict[Held, None](), list[int]()
        self._sent = threading.Condition()
        self._ask, self._end = list[Held](), list[int]()
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
            self._ask = [held for held in (*self._ask, *self.waiting) if held.number not in self.ended]
            self._end += self.ended
            self.waiting, self.ended = {}, []
            self._sent.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="jaxinfer-masks", daemon=True)
            self._thread.start()

    def _hurry(self, helper: Helper, seconds: float) -> None:
        """See to a helper that has been asked ``seconds`` ago."""
        if seconds > _WALL_SECONDS:
            helper.kill()
        elif seconds > _LONG_SECONDS and not self._hurried:
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
                ask, end, self._ask, self._end = self._ask, self._end, [], []
            if not self._stopped:
                self._answer(ask, end)

    def _answer(self, ask: list[Held], end: list[int]) -> None:
        answer = self._asked(ask, end)
        if answer is None and len(ask) > 1 and not self._stopped:
            for each in ask:  # whose grammar it was shows when each is asked by itself
                self._answer([each], [])
            return
        states, masks = [Answer(_TOO_LONG, [], [])] * len(ask), b""
        if answer is not None:
            head, _, masks = answer.partition(b"\n")
            states = [Answer(*each) for each in json.loads(head)]
        rows = iter(np.frombuffer(masks, np.int32).reshape(-1, max(1, self._words)))
        with self._came:
            for held, state in zip(ask, states, strict=True):
                held.hear(state, rows, self._words)
            self._came.notify_all()

    def _asked(self, ask: list[Held], end: list[int]) -> bytes | None:
        """Ask the helper, which learns the grammars that it does not know; None: it was killed, or died."""
        try:
            helper = self._started()
        except RuntimeError:  # it does not start
            return None
        items = [self._item(held) for held in ask]
        self._hurried = any(grammar is not None for _, grammar, _ in items)  # it stands back by itself
        self._since = time.monotonic()
        answer = helper.ask(ask_for(items, end))
        self._since = 0.0
        return answer

    def _started(self) -> Helper:
        if self._helper is None:
            vocabulary = self._vocabulary()
            self._words = vocabulary.words
            self._helper = Helper(MODULE, setup(CPU_SECONDS, vocabulary, self._ahead))
        if self._helper.start():
            self._generation += 1
        return self._helper

    def _item(self, held: Held) -> Item:
        """What a matcher is asked: one that the helper knows is told what is new, another one all."""
        known = held.generation == self._generation
        first, last = held.told if known else 0, len(held.said)  # the engine's thread may add to it
        held.generation, held.told = self._generation, last
        return held.number, None if known else held.grammar, held.said[first:last]
