"""State of one sample of one request in the engine. No jax."""

from __future__ import annotations

import dataclasses
import enum
import math
from array import array
from collections.abc import Sequence as Row

from jaxinfer.engine.scheduling.images import PromptImages
from jaxinfer.engine.scheduling.stats import Times
from jaxinfer.kv.manager import Swapped
from jaxinfer.kv.radix import PageKeys
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.spec import Acceptance
from jaxinfer.structured.masks import Held
from jaxinfer.structured.thinking import Thought
from jaxinfer.types import FinishReason, PositionLogprobs, Request, SequenceDelta


class Status(enum.Enum):
    """State of a sequence: waiting for a sibling's prompt, queued, in a slot, or done."""

    WAITING_FOR_PROMPT = "waiting_for_prompt"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and its generated tokens.

    ``tokens`` are the tokens known to the host: the prompt and the tokens read (an array, which costs the garbage
    collector nothing however many requests wait). ``scheduled`` counts the tokens whose keys and values are computed,
    or will be by steps already launched; after a preemption with recompute it is less than ``tokens``, which are fed
    again. Tokens before ``prefill_end`` run in prefill chunks, the others as decode rows: from ``prompt_end``, the last
    prompt token, on, unless generated tokens are recomputed in chunks (`SequencePages.chunks_end`). ``in_flight``
    counts rows that were launched and not read.

    The device keeps, for each slot, the token that the slot's row sampled last. ``sampled`` is the position of that row
    for this sequence since it took its slot; -1: none yet. So the host feeds the token at ``position`` (`token_at`)
    unless ``sampled == position - 1``: a slot has no token that its sequence sampled in another slot.
    """

    request: Request
    index: int
    arrival: int
    tokens: array[int]
    keys: PageKeys
    prefill_end: int
    final_length: int  # most tokens that can ever have keys: the last generated one is never fed
    images: PromptImages | None = None
    status: Status = Status.WAITING
    slot: int = -1
    lora_slot: int = -1  # bank slot of its adapter; -1: no adapter
    scheduled: int = 0
    in_flight: int = 0
    sampled: int = -1
    branches: list[int] = dataclasses.field(default_factory=list)  # KV slots of further draft paths in flight
    drafted: int = 0  # position, after the prompt, up to which the draft model or head has keys and values
    base: int = 0  # first position with draft head keys: the start of a page
    kept: int = 0  # first position with kept features in its slot, within the window
    charged: int = 0  # prompt tokens that its tenant was charged for
    capacity: int = 0  # tokens that its pages hold
    cached: int | None = None  # prompt tokens found in the prefix cache at the first admission
    codes: list[int] = dataclasses.field(default_factory=list)
    swapped: Swapped | None = None
    prompt_logprobs: list[PositionLogprobs | None] = dataclasses.field(default_factory=lambda: [None])
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    stateful: bool = False  # the sampler keeps counts or a bias for it
    followers: list[Sequence] = dataclasses.field(default_factory=list)  # samples that share this one's prompt
    leader: Sequence | None = None  # the sample whose prompt this one shares
    sampler_state: object = None  # snapshot of the runner, from a preemption until all known tokens are computed
    restarted: bool = False  # its known tokens were sampled under other weights
    held: Held | None = None  # its grammar state, from its first slot on
    thought: Thought | None = None  # its thinking state before the constrained output, from its first slot on, if any
    acceptance: Acceptance = dataclasses.field(default_factory=Acceptance)
    times: Times = dataclasses.field(default_factory=Times)
    prompt_end: int = dataclasses.field(init=False)  # the position of the last prompt token

    def __post_init__(self) -> None:
        self.prompt_end = self.prefill_end

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.request.prompt_token_ids

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_end - 1

    @property
    def prefilling(self) -> bool:
        return self.scheduled < self.prefill_end

    def token_at(self, position: int) -> int | None:
        """Return the input token of a row at ``position``; -1: the token that its slot sampled last; None: not
        available until the row before has been read."""
        if position < len(self.tokens):
            return self.tokens[position]
        if self.forced:
            return self.forced[position - self.prompt_end - 1]
        return -1 if self.sampled == position - 1 else None

    @property
    def forced(self) -> Row[int]:
        """All tokens that the request forces."""
        return self.params.forced_token_ids or ()

    @property
    def redrawn(self) -> bool:
        """Whether recomputed tokens may be drawn differently: under other weights, where drafts were accepted as
        typical, or because no constraint applies to known tokens."""
        held = self.params.grammar is not None or self.params.thinking_token_budget is not None
        return self.restarted or self.params.typical or held

    @property
    def begun(self) -> bool:
        """Whether it has been admitted, and anything of it is kept."""
        return self.cached is not None

    def restart(self) -> None:
        """Forget what was computed, but for its tokens."""
        self.scheduled = 0
        self.restarted = self.generated > 0
        if not self.generated:
            self.cached, self.prompt_logprobs = None, [None]

    @property
    def is_held(self) -> bool:
        """Whether the grammar constrains the next token, as far as is known."""
        return self.held is not None and (self.thought is None or not self.thought.open)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def take(self, tokens: list[int]) -> int:
        """Append generated tokens up to one that ends the sequence; return their number. A negative token is the marker
        of non-finite logits."""
        known, stops = self.tokens, self.request.stop_token_ids
        for count, token in enumerate(tokens, 1):
            if token < 0 or not (self.generated or self._scored):
                self.finish_reason = FinishReason.NOT_FINITE
                return count - 1
            known.append(token)
            if token in stops and self.generated >= self.params.never_ends_before:
                self.finish_reason, self.stop_reason = FinishReason.STOP, token
                return count
            if len(known) > self.final_length:
                self.finish_reason = FinishReason.LENGTH
                return count
        return len(tokens)

    @property
    def _scored(self) -> bool:
        """Whether the requested prompt log probabilities are finite."""
        return all(position is None or math.isfinite(position.chosen.logprob) for position in self.prompt_logprobs)

    def added(self, delta: SequenceDelta | None, tokens: list[int], logprobs: Row[PositionLogprobs]) -> SequenceDelta:
        """Add the tokens just taken to the delta of earlier rows of a step, or to a new one."""
        if delta is not None:
            delta.token_ids += tokens
            delta.logprobs = [*delta.logprobs, *logprobs]
            return delta
        delta = SequenceDelta(self.request.request_id, self.index, tokens, logprobs)
        if self.generated == len(tokens):
            delta.cached_tokens = self.cached
            if self.request.params.prompt_logprobs is not None:
                delta.prompt_logprobs = self.prompt_logprobs
        return delta


def needs_sampler_state(request: Request) -> bool:
    """Whether the sampler keeps state of this request between tokens: counts, a bias, the last tokens."""
    params = request.params
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    long_words = any(len(ids) > 1 for ids in request.bad_words_ids)
    bias = bool(params.logit_bias) or params.allowed_token_ids is not None
    return penalties != (0.0, 0.0, 1.0) or long_words or bias
