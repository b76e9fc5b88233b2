"""Conversion of generated token ids to user-visible text, with stop strings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.stop import StopMatcher
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import FinishReason, PositionLogprobs, Request, SequenceDelta, WeightVersions, first_versions

NOT_FINITE = "the model's logits are NaN or infinite: its weights overflow"
"""Message for an output that ended with non-finite logits."""


class TextDelta(NamedTuple):
    """New text, the stop string that ended it (None: it continues), and the number of tokens used for it."""

    text: str
    stop: str | None = None
    tokens: int = 0


@dataclasses.dataclass(slots=True)
class OutputDelta:
    """Streaming delta of one output. ``finish_reason`` is set in the last one: a value of `FinishReason`.

    Attributes:
        index: 0 to n-1.
        text: complete characters.
        logprobs: one for each token, if requested.
        stop_reason: under "stop", the request's own stop token or stop string that ended it; under "error", the reason.
        prompt_logprobs: in the first delta of output 0, if requested; the first entry is None.
        acceptance: with the finish reason: "typical" where drafts were accepted by that rule; None: exact.
        weight_versions: of the tokens, in order; see `WeightVersions`.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: Sequence[PositionLogprobs] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    acceptance: str | None = None
    weight_versions: WeightVersions = ()


class Output:
    """User-visible state of one output: identical for every API, however the engine's deltas are merged.

    Args:
        tokenizer: None: the output has no text, and only tokens end it.
        request: accepted by the engine.

    Attributes:
        ended: the last delta has been returned; there must be no further one.
    """

    def __init__(self, tokenizer: Tokenizer | None, request: Request) -> None:
        self._text = None if tokenizer is None else OutputText(tokenizer, request.prompt_token_ids, request.params)
        self._stop_token_ids = request.params.stop_token_ids or ()
        self._acceptance = "typical" if request.params.typical else None
        self.ended = False

    def take(self, delta: SequenceDelta) -> OutputDelta:
        """Convert the engine's ``delta`` to the next delta of the output.

        A stop string ends the output: then there is a finish reason although ``delta`` may have none (the caller must
        then abort the sequence in the engine), and tokens after the one that completed it are dropped.
        """
        reason = delta.finish_reason
        made = OutputDelta(delta.index, "", delta.token_ids, delta.logprobs, prompt_logprobs=delta.prompt_logprobs)
        if self._text is not None:
            # A completed grammar also ends an output: after its last token, without a stop token.
            by_token = reason is FinishReason.STOP and delta.stop_reason is not None
            made.text, stop, used = self._text.push(delta.token_ids, ended_by_token=by_token)
            if stop is not None:
                made.token_ids, made.logprobs = delta.token_ids[:used], delta.logprobs[:used]
            elif reason is not None:
                rest, stop, _ = self._text.finish()
                made.text += rest
            if stop is not None:
                made.stop_reason, reason = stop, FinishReason.STOP
        made.weight_versions = first_versions(delta.weight_versions, len(made.token_ids))
        if reason is FinishReason.NOT_FINITE:
            self.ended, made.finish_reason, made.stop_reason = True, FinishReason.ERROR.value, NOT_FINITE
        elif reason is FinishReason.UNAVAILABLE:
            self.ended, made.finish_reason, made.stop_reason = True, FinishReason.ERROR.value, delta.stop_reason
        elif reason is not None:
            self.ended, made.finish_reason, made.acceptance = True, reason.value, self._acceptance
            if reason is FinishReason.ERROR or (made.stop_reason is None and delta.stop_reason in self._stop_token_ids):
                made.stop_reason = delta.stop_reason
        return made


class OutputText:
    """Text of one output, delta by delta.

    A token that ends the sequence (EOS or a stop token) is not part of the text unless ``include_stop_str_in_output``.
    A stop string ends it if it is completed after ``min_tokens`` tokens, wherever it begins.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, params.skip_special_tokens)
        self._matcher = StopMatcher(stops, params.include_stop_str_in_output) if stops else None
        self._include_stop_token = params.include_stop_str_in_output
        self._unchecked = params.min_tokens

    def push(self, token_ids: Sequence[int], *, ended_by_token: bool = False) -> TextDelta:
        """Take new tokens; ``ended_by_token``: the last of them is a stop token."""
        visible = token_ids if self._include_stop_token or not ended_by_token else token_ids[:-1]
        if self._matcher is None:
            return TextDelta(self._detokenizer.push(visible), None, len(token_ids))
        early = visible[: self._unchecked]
        self._unchecked -= len(early)
        text = self._matcher.skip(self._detokenizer.push(early))
        # one by one, to know which token completes a stop string
        for used, token in enumerate(visible[len(early) :], len(early) + 1):
            emitted = self._matcher.push(self._detokenizer.push((token,)))
            text += emitted.text
            if emitted.stop is not None:
                return TextDelta(text, emitted.stop, used)
        return TextDelta(text, None, len(token_ids))

    def finish(self) -> TextDelta:
        """Return the text held back: the rest of a character, or an incomplete stop string."""
        rest = self._detokenizer.finish()
        if self._matcher is None:
            return TextDelta(rest)
        emitted = self._matcher.push(rest)
        return TextDelta(emitted.text + ("" if emitted.stop else self._matcher.finish()), emitted.stop)
