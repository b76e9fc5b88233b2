"""From generated token ids to the text that a user sees, with stop strings taken into account."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.stop import StopMatcher
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import FinishReason, Request, SamplingParams, SequenceDelta


class TextDelta(NamedTuple):
    """New text, the stop string that ended it (None: goes on), and how many of the tokens made it."""

    text: str
    stop: str | None = None
    tokens: int = 0


class Piece(NamedTuple):
    """What a delta adds to an output besides its tokens. ``finish_reason`` is set in the last one.

    ``stop_reason`` is the request's own stop token or stop string that ended it, never the model's EOS.
    """

    text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Output:
    """One output of a request as a user sees it: the same for every door, however the engine's deltas are merged.

    Args:
        tokenizer: None: the output has no text, and nothing but tokens ends it.
        request: accepted by the engine.

    Attributes:
        ended: the last piece has come out; there must be no further delta.
    """

    def __init__(self, tokenizer: Tokenizer | None, request: Request) -> None:
        self._text = None if tokenizer is None else OutputText(tokenizer, request.prompt_token_ids, request.params)
        self._own_stops = request.params.stop_token_ids or ()
        self.ended = False

    def take(self, delta: SequenceDelta) -> Piece:
        """The piece that ``delta`` makes.

        A stop string ends the output: its piece has a finish reason although ``delta`` may have none (the engine must
        be told then), and tokens behind the one that completed it are cut off from ``delta``.
        """
        reason = delta.finish_reason
        text, stop = "", None
        if self._text is not None:
            text, stop, used = self._text.push(delta.token_ids, ended_by_token=reason is FinishReason.STOP)
            if stop is None and reason is not None:
                rest, stop, _ = self._text.finish()
                text += rest
            elif stop is not None:
                _cut(delta, used)
        if stop is None and reason is None:
            return Piece(text)
        self.ended = True
        if stop is not None:
            return Piece(text, FinishReason.STOP, stop)
        return Piece(text, reason, delta.stop_reason if delta.stop_reason in self._own_stops else None)


class OutputText:
    """The text of one output, delta by delta.

    A token that ends the sequence (EOS or a stop token) is not part of the text unless
    ``include_stop_str_in_output``. Stop strings are looked for only after ``min_tokens`` tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, params.skip_special_tokens)
        self._matcher = StopMatcher(stops, params.include_stop_str_in_output) if stops else None
        self._keep_stop_token = params.include_stop_str_in_output
        self._unchecked = params.min_tokens

    def push(self, token_ids: Sequence[int], *, ended_by_token: bool = False) -> TextDelta:
        """Take new tokens; ``ended_by_token`` says that the last of them is a stop token."""
        shown = token_ids if self._keep_stop_token or not ended_by_token else token_ids[:-1]
        if self._matcher is None:
            return TextDelta(self._detokenizer.push(shown), None, len(token_ids))
        early = shown[: self._unchecked]
        self._unchecked -= len(early)
        text = self._detokenizer.push(early)
        # One by one, so that it is known which of them completes a stop string.
        for used, token in enumerate(shown[len(early) :], len(early) + 1):
            emitted = self._matcher.push(self._detokenizer.push((token,)))
            text += emitted.text
            if emitted.stop is not None:
                return TextDelta(text, emitted.stop, used)
        return TextDelta(text, None, len(token_ids))

    def finish(self) -> TextDelta:
        """What was held back: the rest of a character, or the beginning of a stop string that did not come."""
        rest = self._detokenizer.finish()
        if self._matcher is None:
            return TextDelta(rest)
        emitted = self._matcher.push(rest)
        return TextDelta(emitted.text + ("" if emitted.stop else self._matcher.finish()), emitted.stop)


def _cut(delta: SequenceDelta, tokens: int) -> None:
    """``delta`` is changed: the engine gave it away."""
    del delta.token_ids[tokens:]
    delta.logprobs = delta.logprobs[:tokens]
