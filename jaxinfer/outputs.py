"""Outputs of `LLM`: texts, tokens and log probabilities of a request. No jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
from jaxtyping import Float32, Int32

from jaxinfer.brief import ShortRepr
from jaxinfer.text.intake import Prompt
from jaxinfer.text.output import Output, OutputDelta
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import (
    PositionExtras,
    PositionLogprobs,
    Request,
    SequenceDelta,
    WeightVersions,
    added_versions,
    experts_of,
)


class Logprob(NamedTuple):
    """Candidate token: its log-probability under the raw logits, its rank from 1, its text."""

    logprob: float
    rank: int
    decoded_token: str | None


LogprobsDict = dict[int, Logprob]

TokenText = Callable[[int], str | None]
"""Function that returns a token's text."""


class TokenLogprobs(Sequence[LogprobsDict]):
    """Candidates of each position, as dictionaries by token id that are made when they are first read."""

    def __init__(self, positions: Sequence[PositionLogprobs], token_text: TokenText) -> None:
        self._positions, self._text = positions, token_text
        self._made: list[LogprobsDict] = []

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> LogprobsDict: ...
    @overload
    def __getitem__(self, index: slice) -> list[LogprobsDict]: ...
    def __getitem__(self, index: int | slice) -> LogprobsDict | list[LogprobsDict]:
        more = self._positions[len(self._made) :]
        self._made += [candidates_of(position, self._text) for position in more]
        return self._made[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == other[:]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self[:])

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self[:],)  # copies and pickles are lists


def _vocabularies(extras: Iterable[PositionExtras]) -> list[np.ndarray]:
    return [np.frombuffer(each.vocabulary or b"", np.float32) for each in extras]


def candidates_of(position: PositionLogprobs, token_text: TokenText) -> LogprobsDict:
    """Return the candidates of a position by token id."""
    return {c.token_id: Logprob(c.logprob, c.rank, token_text(c.token_id)) for c in (*position.top, position.chosen)}


@dataclasses.dataclass(frozen=True, eq=False)
class TokenArrays:
    """The numbers of one output as numpy arrays, an entry for each token. None: not requested.

    Attributes:
        logprobs: log probability of each token, or what ``logprobs_mode`` says.
        entropies: in nats.
        token_logprobs: of the ``logprob_token_ids``.
        sampling_mask: token ids that the sampler could draw, as ``indptr`` and ``indices`` of a CSR matrix: those of
            token i are ``indices[indptr[i] : indptr[i + 1]]``, ascending.
        vocabulary: log probabilities of the whole vocabulary.
        routed_experts: experts that the forward pass of each token took, that of the token before it: the argument of
            `Model.apply` at these positions.
    """

    token_ids: Int32[np.ndarray, " tokens"]
    logprobs: Float32[np.ndarray, " tokens"] | None = None
    entropies: Float32[np.ndarray, " tokens"] | None = None
    token_logprobs: Float32[np.ndarray, "tokens ids"] | None = None
    sampling_mask: tuple[Int32[np.ndarray, " bounds"], Int32[np.ndarray, " kept"]] | None = None
    vocabulary: Float32[np.ndarray, "tokens vocab"] | None = None
    routed_experts: Int32[np.ndarray, "tokens layers top_k"] | None = None


def arrays_of(token_ids: Sequence[int], positions: Sequence[PositionLogprobs]) -> TokenArrays:
    """Return the arrays of tokens and, where they were requested, of their log probabilities and extras."""
    tokens = np.array(token_ids, np.int32)
    if not positions:
        return TokenArrays(tokens, None if token_ids else np.zeros(0, np.float32))
    extras = [position.extras or PositionExtras() for position in positions]
    first = extras[0]
    kept = [np.frombuffer(each.kept or b"", np.int32) for each in extras]
    bounds = np.cumsum([0, *map(len, kept)], dtype=np.int32)
    return TokenArrays(
        tokens,
        np.array([position.chosen.logprob for position in positions], np.float32),
        None if first.entropy is None else np.array([each.entropy for each in extras], np.float32),
        np.array([each.token_logprobs for each in extras], np.float32) if first.token_logprobs else None,
        None if first.kept is None else (bounds, np.concatenate(kept)),
        None if first.vocabulary is None else np.stack(_vocabularies(extras)),
        _routed(positions),
    )


def _routed(positions: Sequence[PositionLogprobs | None]) -> Int32[np.ndarray, "positions layers top_k"] | None:
    found = experts_of(positions)
    if not found:
        return None
    return np.frombuffer(b"".join(each.ids for each in found), np.int32).reshape(len(found), found[0].layers, -1)


@dataclasses.dataclass(repr=False)
class CompletionOutput(ShortRepr):
    """A sample. ``logprobs`` has, for each token, the chosen id and the most likely ones. ``acceptance`` is "typical"
    where drafts were accepted by that rule, which changes tokens (None: exact). ``positions`` is what ``logprobs`` and
    `arrays` are made of. ``weight_versions`` are pairs (version, number of tokens), in order; empty: all tokens are of
    version 0."""

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: Sequence[LogprobsDict] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    acceptance: str | None = None
    weight_versions: WeightVersions = ()
    positions: list[PositionLogprobs] = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def weight_version(self) -> int:
        """Version of the weights that computed the last token; 0: those of the start."""
        return self.weight_versions[-1][0] if self.weight_versions else 0

    @property
    def arrays(self) -> TokenArrays:
        """Tokens and requested numbers, without a dictionary for each token; made anew at each call."""
        return arrays_of(self.token_ids, self.positions)


@dataclasses.dataclass(repr=False)
class RequestOutput(ShortRepr):
    """Outputs of one prompt. ``seed`` is the one used; ``prompt_logprobs[0]`` is None, because no token precedes it.
    ``prompt_positions`` is what `prompt_routed_experts` is made of."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    seed: int
    prompt_logprobs: list[LogprobsDict | None] | None = None
    prompt_positions: Sequence[PositionLogprobs | None] = dataclasses.field(
        default=(), init=False, repr=False, compare=False
    )

    @property
    def prompt_routed_experts(self) -> Int32[np.ndarray, "positions layers top_k"] | None:
        """Experts of all prompt tokens but the last, whose are the first of ``outputs[i].arrays.routed_experts``. None:
        not requested (``return_routed_experts`` with ``prompt_logprobs``), or there is no such token."""
        return _routed(self.prompt_positions)

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


class Collector:
    """Collects the engine's deltas of one request into a `RequestOutput`.

    Args:
        request: accepted by the engine.

    Attributes:
        output: what has been generated so far; it grows.
        open: indices of the samples that have not ended.
    """

    def __init__(self, prompt: Prompt, request: Request, tokenizer: Tokenizer | None) -> None:
        seed = request.params.seed
        assert seed is not None  # resolved by the engine
        self._tokenizer = tokenizer
        self._texts = [Output(tokenizer, request) for _ in range(request.params.n)]
        self.open = set(range(request.params.n))
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[CompletionOutput(index) for index in range(request.params.n)],
            seed=seed,
        )

    def take(self, delta: SequenceDelta) -> OutputDelta:
        """Add a delta of an open sample; return what is new. See `Output.take` for stop strings."""
        new, output = self._texts[delta.index].take(delta), self.output.outputs[delta.index]
        output.text += new.text
        output.weight_versions = added_versions(
            output.weight_versions, len(output.token_ids), new.weight_versions, len(new.token_ids)
        )
        output.token_ids.extend(new.token_ids)
        self._take_logprobs(output, new)
        if new.finish_reason is not None:
            output.finish_reason, output.stop_reason = new.finish_reason, new.stop_reason
            output.acceptance = new.acceptance
            self.open.discard(delta.index)
        return new

    def _take_logprobs(self, output: CompletionOutput, new: OutputDelta) -> None:
        whole = self.output
        if new.prompt_logprobs is not None and whole.prompt_logprobs is None:
            whole.prompt_positions = found = new.prompt_logprobs
            whole.prompt_logprobs = [None if p is None else candidates_of(p, self._token_text) for p in found]
        if new.logprobs:
            if output.logprobs is None:
                output.logprobs = TokenLogprobs(output.positions, self._token_text)
            output.positions.extend(new.logprobs)
            chosen = math.fsum(position.chosen.logprob for position in new.logprobs)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + chosen

    def _token_text(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_bytes(token).decode(errors="replace")
