"""Conversion of `OutputDelta`s to messages of `vllm.grpc.engine`, streamed or complete."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jaxinfer.serve.frontend.generation import Generation
from jaxinfer.serve.grpc.vllm import messages
from jaxinfer.text.output import OutputDelta
from jaxinfer.types import PositionLogprobs


class Answer:
    """Creates the response messages of one request.

    Args:
        stream: send tokens in chunks as they are generated; each output ends with a message that repeats its ids, but
            not their log probabilities. Otherwise send one message per output, after all outputs have ended.
    """

    def __init__(self, generation: Generation, *, stream: bool) -> None:
        self._generation, self._stream = generation, stream
        self._ids: list[list[int]] = [[] for _ in range(generation.n)]
        self._logprobs: list[list[PositionLogprobs]] = [[] for _ in range(generation.n)]
        self._ends: dict[int, OutputDelta] = {}
        self._prompt: Sequence[PositionLogprobs | None] | None = None

    def responses(self, delta: OutputDelta) -> Iterator[messages.pb.GenerateResponse]:
        """Yield the messages for a delta: at most a chunk, and a message that completes its output."""
        self._ids[delta.index].extend(delta.token_ids)
        if self._stream:
            if delta.token_ids or delta.prompt_logprobs:
                yield messages.pb.GenerateResponse(chunk=self._chunk(delta))
            if delta.finish_reason is not None:
                yield messages.pb.GenerateResponse(complete=self._complete(delta))
            return
        self._logprobs[delta.index].extend(delta.logprobs)
        self._prompt = delta.prompt_logprobs or self._prompt
        if delta.finish_reason is not None:
            self._ends[delta.index] = dataclasses.replace(delta, logprobs=self._logprobs[delta.index])

    def rest(self) -> Iterator[messages.pb.GenerateResponse]:
        """Yield the messages after the last delta: all messages of a non-streamed response."""
        for _, end in sorted(self._ends.items()):
            complete = self._complete(end)
            _set_output_logprobs(complete, end.logprobs)
            _set_input_logprobs(complete, self._prompt, self._generation.prompt_token_ids)
            yield messages.pb.GenerateResponse(complete=complete)

    def _chunk(self, delta: OutputDelta) -> messages.pb.GenerateStreamChunk:
        chunk = messages.pb.GenerateStreamChunk(
            token_ids=delta.token_ids, completion_tokens=len(delta.token_ids), **self._common(delta)
        )
        _set_output_logprobs(chunk, delta.logprobs)
        _set_input_logprobs(chunk, delta.prompt_logprobs, self._generation.prompt_token_ids)
        return chunk

    def _complete(self, delta: OutputDelta) -> messages.pb.GenerateComplete:
        ids, (drafted, accepted) = self._ids[delta.index], self._generation.drafts[delta.index]
        complete = messages.pb.GenerateComplete(
            output_ids=ids,
            finish_reason=delta.finish_reason,
            completion_tokens=len(ids),
            spec_draft_tokens=drafted,
            spec_accepted_tokens=accepted,
            **self._common(delta),
        )
        if isinstance(delta.stop_reason, str):
            complete.matched_stop_str = delta.stop_reason
        elif delta.stop_reason is not None:
            complete.matched_token_id = delta.stop_reason
        return complete

    def _common(self, delta: OutputDelta) -> dict[str, int]:
        usage = self._generation.usage
        return {"prompt_tokens": usage.prompt, "cached_tokens": usage.cached, "index": delta.index}


def _set_output_logprobs(message: Any, positions: Sequence[PositionLogprobs]) -> None:
    if not positions:
        return
    found = message.output_logprobs
    found.token_logprobs.extend(position.chosen.logprob for position in positions)
    found.token_ids.extend(position.chosen.token_id for position in positions)
    _add_top(found, positions)


def _set_input_logprobs(
    message: Any, positions: Sequence[PositionLogprobs | None] | None, prompt: Sequence[int]
) -> None:
    """Set prompt logprobs; the first token has none."""
    if not positions:
        return
    found = message.input_logprobs
    for position in positions:
        value = {} if position is None else {"value": position.chosen.logprob}
        found.token_logprobs.add(**value)
    found.token_ids.extend(prompt)
    _add_top(found, positions)


def _add_top(found: Any, positions: Sequence[PositionLogprobs | None]) -> None:
    """Add one entry for each position, if any position has top logprobs."""
    if not any(position is not None and position.top for position in positions):
        return
    for position in positions:
        top = () if position is None else position.top
        found.top_logprobs.add(values=[each.logprob for each in top], token_ids=[each.token_id for each in top])
