"""One sample of one request on its way through the engine. No jax."""

from __future__ import annotations

import dataclasses

from jaxinfer.types import FinishReason, PositionLogprobs, Request, SamplingParams


@dataclasses.dataclass(eq=False)
class Sequence:
    """A prompt and what was generated after it.

    Lengths count tokens of prompt and output together:

    - ``scheduled``: keys and values of these are computed, or will be by steps already launched;
    - ``committed`` (prompt plus ``output``): results that the host has read.

    The last prompt token and every generated one run as a decode row; the tokens before run in prefill chunks.
    """

    request: Request
    index: int
    slot: int = -1
    scheduled: int = 0
    output: list[int] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] = dataclasses.field(default_factory=lambda: [None])
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.request.prompt_token_ids

    @property
    def prefill_end(self) -> int:
        return len(self.prompt) - 1

    @property
    def max_tokens(self) -> int:
        """Resolved when the request was validated: never None here."""
        assert self.params.max_tokens is not None
        return self.params.max_tokens

    @property
    def final_length(self) -> int:
        """Most tokens that this sequence can ever have keys for: the last generated token is never fed back."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def prefilling(self) -> bool:
        return self.scheduled < self.prefill_end

    @property
    def decodable(self) -> bool:
        return not self.prefilling and self.scheduled < self.final_length

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, token: int) -> None:
        """Take a generated token and finish if it ends the sequence."""
        self.output.append(token)
        enough = len(self.output) >= self.params.min_tokens
        if token in self.request.stop_token_ids and enough:
            self.finish_reason, self.stop_reason = FinishReason.STOP, token
        elif len(self.output) >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
