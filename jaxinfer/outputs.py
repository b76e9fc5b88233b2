"""Outputs of `LLM`: texts, tokens and log probabilities of a request. No jax."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from jaxinfer.brief import ShortRepr
from jaxinfer.text.intake import Prompt
from jaxinfer.types import Request, WeightVersions


class Logprob(NamedTuple):
    """Candidate token: its log-probability under the raw logits, its rank from 1, its text."""

    logprob: float
    rank: int
    decoded_token: str | None


LogprobsDict = dict[int, Logprob]


@dataclasses.dataclass(repr=False)
class CompletionOutput(ShortRepr):
    """A sample. ``logprobs`` has, for each token, the chosen id and the most likely ones. ``acceptance`` is "typical"
    where drafts were accepted by that rule, which changes tokens (None: exact). ``weight_versions`` are pairs (version,
    number of tokens), in order; empty: all tokens are of version 0."""

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsDict] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    acceptance: str | None = None
    weight_versions: WeightVersions = ()

    @property
    def weight_version(self) -> int:
        """Version of the weights that computed the last token; 0: those of the start."""
        return self.weight_versions[-1][0] if self.weight_versions else 0


@dataclasses.dataclass(repr=False)
class RequestOutput(ShortRepr):
    """Outputs of one prompt. ``seed`` is the one used; ``prompt_logprobs[0]`` is None, because no token precedes it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    seed: int
    prompt_logprobs: list[LogprobsDict | None] | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@dataclasses.dataclass(frozen=True, repr=False)
class Score(ShortRepr):
    """Score of a continuation: tokens, log-probability of each, the sum, and whether each is the most likely one."""

    token_ids: list[int]
    logprobs: list[LogprobsDict]
    logprob: float
    is_greedy: bool


@dataclasses.dataclass(frozen=True)
class Delta:
    """A streaming delta of one output. ``request`` is the index of the prompt in the call."""

    request: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


def score_of(ids: list[int], output: RequestOutput) -> Score:
    """Return the score of a continuation, from the prompt logprobs of context and continuation."""
    assert output.prompt_logprobs is not None  # they were requested
    found = [position for position in output.prompt_logprobs[-len(ids) :] if position is not None]
    chosen = [position[token] for token, position in zip(ids, found, strict=True)]
    return Score(ids, found, math.fsum(c.logprob for c in chosen), all(c.rank == 1 for c in chosen))


def empty_output(prompt: Prompt, request: Request) -> RequestOutput:
    """Return the outputs of an accepted request, without a token."""
    seed = request.params.seed
    assert seed is not None  # resolved by Engine.add
    return RequestOutput(
        request_id=request.request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=list(request.prompt_token_ids),
        outputs=[CompletionOutput(index) for index in range(request.params.n)],
        seed=seed,
    )
