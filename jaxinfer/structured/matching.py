"""Request handling in a grammar helper: masks of its matchers, and grammar checks. No jax."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

import numpy as np

from jaxinfer.helper_process import BAD, GOOD, allow_cpu, lower_priority
from jaxinfer.structured.answers import STOPPED, Answer
from jaxinfer.structured.grammar import compiled
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


def checked(head: bytes, text: bytes) -> bytes:
    """Reply to `helper.check`, in a thread with idle priority."""
    lower_priority()
    try:
        compiled(json.loads(head)["check"], text.decode())
    except GrammarError as error:
        return BAD + f"{error.place}\n{error}".encode(errors="replace")
    return GOOD


class Matching:
    """Matchers of a helper, by number.

    Args:
        vocabulary: packed.
        seconds: CPU seconds for each item of a request.
        ahead: tokens to look ahead.
    """

    def __init__(self, vocabulary: bytes, seconds: float, ahead: int = 0) -> None:
        self._matchers, self._seconds, self._ahead = Matchers(Vocabulary.unpacked(vocabulary)), seconds, ahead
        self._known: dict[int, Matcher] = {}

    def answer(self, head: bytes, texts: bytes) -> bytes:
        """Reply to `helper.ask`. The thread gets idle priority if it compiles a grammar."""
        question = json.loads(head)
        for number in question["end"]:
            self._known.pop(number, None)
        if not question["quick"] and any(grammar is not None for _, grammar, _ in question["ask"]):
            lower_priority()
        answers, whole, at = list[Answer](), list[bytes](), 0
        for number, grammar, tokens in question["ask"]:
            allow_cpu(self._seconds)
            if grammar is not None:
                kind, size, scope = grammar
                grammar, at = (kind, texts[at : at + size].decode(), scope), at + size
            answer, masks = self._tried(number, grammar, tokens)
            answers.append(answer)
            whole += masks
        return json.dumps(answers).encode() + b"\n" + b"".join(whole)

    def _tried(self, number: int, grammar: Grammar | None, tokens: list[int]) -> tuple[Answer, list[bytes]]:
        start = time.thread_time()
        try:
            answer, masks = self._next(number, grammar, tokens)
        except GrammarError as error:
            return _failed(str(error) or "the grammar failed"), []
        seconds = time.thread_time() - start
        burden = seconds if grammar is None else seconds / _LEARNT_FOR
        return answer._replace(slow=grammar is None and seconds > _SLOW_SECONDS, burden=burden), masks

    def _next(self, number: int, grammar: Grammar | None, tokens: list[int]) -> tuple[Answer, list[bytes]]:
        """Return the reply of a matcher, and the masks that are not in it."""
        if grammar is not None:
            self._known[number] = self._matchers.new(*grammar)
        matcher = self._known[number]
        if tokens:
            matcher.consume(tokens)
        mask = matcher.mask()
        if matcher.stopped:
            return _failed(STOPPED), []
        if is_empty(mask):
            return _failed("the model has no token that the grammar allows here"), []
        tokens, masks = matcher.ahead(self._ahead) if self._ahead else ([], [])
        told = [_few(each) for each in (mask, *masks)]
        return Answer(None, tokens, told), _left(told, (mask, *masks))


def _failed(state: str) -> Answer:
    return Answer(state, [], [])


def _few(mask: bytes) -> list[int] | None:
    """Return the token ids of a mask, if there are few."""
    if len(mask) - mask.count(0) > _FEW:
        return None
    places = np.flatnonzero(np.frombuffer(mask, np.uint8)).tolist()
    return [8 * place + bit for place in places for bit in range(8) if mask[place] >> bit & 1]


def _left(told: Iterable[list[int] | None], masks: Iterable[bytes]) -> list[bytes]:
    return [mask for ids, mask in zip(told, masks, strict=True) if ids is None]
