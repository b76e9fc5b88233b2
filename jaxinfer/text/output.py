"""From generated token ids to the text that a user sees, with stop strings taken into account."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.stop import StopMatcher
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import SamplingParams


@dataclasses.dataclass(frozen=True)
class TextDelta:
    """New text, and the stop string that ended it (None: goes on)."""

    text: str
    stop: str | None = None


class OutputText:
    """The text of one output, delta by delta.

    A token that ends the sequence (EOS or a stop token) is not part of the text unless
    ``include_stop_str_in_output``. Stop strings are looked for only after ``min_tokens`` tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, params.skip_special_tokens)
        self._matcher = StopMatcher(stops, params.include_stop_str_in_output)
        self._keep_stop_token = params.include_stop_str_in_output
        self._unchecked = params.min_tokens

    def push(self, token_ids: Sequence[int], *, ended_by_token: bool = False) -> TextDelta:
        """Take new tokens; ``ended_by_token`` says that the last of them is a stop token."""
        shown = token_ids if self._keep_stop_token or not ended_by_token else token_ids[:-1]
        early, late = shown[: self._unchecked], shown[self._unchecked :]
        self._unchecked -= len(early)
        text = self._detokenizer.push(early) if early else ""
        emitted = self._matcher.push(self._detokenizer.push(late)) if late else None
        return TextDelta(text) if emitted is None else TextDelta(text + emitted.text, emitted.stop)

    def finish(self) -> TextDelta:
        """What was held back: the rest of a character, or the beginning of a stop string that did not come."""
        emitted = self._matcher.push(self._detokenizer.finish())
        rest = "" if emitted.stop else self._matcher.finish()
        return TextDelta(emitted.text + rest, emitted.stop)
