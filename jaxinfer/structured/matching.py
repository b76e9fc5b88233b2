"""Masks of the matchers of a grammar helper. No jax."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np

from jaxinfer.helper_process import allow_cpu, lower_priority
from jaxinfer.structured.answers import STOPPED, Answer, Ask
from jaxinfer.structured.matcher import Matcher, Matchers, Vocabulary, is_empty
from jaxinfer.structured.schemas import GrammarError

_FEW = 64
"""Non-zero bytes up to which a mask, which may have kilobytes, is sent as token ids: those of forced text have few."""
_LEARNT_FOR = 10
"""Minimum number of masks over which compilation is amortised."""
_SLOW_SECONDS = 0.001
"""CPU seconds: some ten times the usual for a mask."""

Grammar = tuple[str, str, str]
"""Kind, text and scope of a grammar."""


class Matching:
    """Matchers of a helper, by number.

    Args:
        seconds: CPU seconds for each item of a request.
        ahead: tokens to look ahead.
    """

    def __init__(self, vocabulary: Vocabulary, seconds: float, ahead: int = 0) -> None:
        self._matchers, self._seconds, self._ahead = Matchers(vocabulary), seconds, ahead
        self._known: dict[int, Matcher] = {}

    def answer(self, frame: bytes) -> bytes:
        """Reply to an `Ask`. The thread gets idle priority if it compiles a grammar."""
        ask = msgspec.msgpack.decode(frame, type=Ask)
        for number in ask.end:
            self._known.pop(number, None)
        if not ask.quick and any(grammar is not None for _, grammar, _ in ask.items):
            lower_priority()
        answers = list[Answer]()
        for item in ask.items:
            allow_cpu(self._seconds)
            answers.append(self._tried(*item))
        return msgspec.msgpack.encode(answers)

    def _tried(self, number: int, grammar: Grammar | None, tokens: Sequence[int]) -> Answer:
        start = time.thread_time()
        try:
            answer = self._next(number, grammar, tokens)
        except GrammarError as error:
            return _failed(str(error) or "the grammar failed")
        seconds = time.thread_time() - start
        burden = seconds if grammar is None else seconds / _LEARNT_FOR
        return answer._replace(slow=grammar is None and seconds > _SLOW_SECONDS, burden=burden)

    def _next(self, number: int, grammar: Grammar | None, tokens: Sequence[int]) -> Answer:
        if grammar is not None:
            self._known[number] = self._matchers.new(*grammar)
        matcher = self._known[number]
        if tokens:
            matcher.consume(tokens)
        mask = matcher.mask()
        if matcher.stopped:
            return _failed(STOPPED)
        if is_empty(mask):
            return _failed("the model has no token that the grammar allows here")
        tokens, masks = matcher.ahead(self._ahead) if self._ahead else ([], [])
        return Answer(None, tokens, [_few(each) for each in (mask, *masks)])


def _failed(state: str) -> Answer:
    return Answer(state, [], [])


def _few(mask: bytes) -> list[int] | bytes:
    """Return the token ids of a mask if there are few, else the mask."""
    if len(mask) - mask.count(0) > _FEW:
        return mask
    places = np.flatnonzero(np.frombuffer(mask, np.uint8)).tolist()
    return [8 * place + bit for place in places for bit in range(8) if mask[place] >> bit & 1]
