"""Host records of sampled results: a few array conversions per step, Python only for requested values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int32

from jaxinfer.engine.scheduling.plan import Branch, DecodePlan, Draft, PrefillPlan, StepPlan
from jaxinfer.engine.scheduling.sequence import Sequence as Sample
from jaxinfer.sampling import Logprobs, Sampled
from jaxinfer.types import PositionLogprobs, TokenLogprob


def with_drafted(plan: StepPlan, drafted: Int32[np.ndarray, "rows drafts"]) -> StepPlan:
    """Replace the placeholders in a plan by the tokens that a draft model drafted, given by the row of each slot."""
    own = {draft.sequence for draft in plan.drafts or ()}
    rows = {row.sequence: row.row for row in reversed(plan.decodes) if row.sequence in own}
    found = {sequence: drafted[row].tolist() for sequence, row in rows.items()}

    def known(sequence: Sample, token: int) -> int:
        return found[sequence][-2 - token] if token < -1 else token

    def told(draft: Draft) -> Draft:
        sequence = draft.sequence
        tokens = [known(sequence, token) for token in draft.tokens]
        branches = (Branch(slot, [known(sequence, token) for token in path]) for slot, path in draft.branches)
        return draft._replace(tokens=tokens, branches=tuple(branches))

    decodes = [row._replace(token=known(row.sequence, row.token)) for row in plan.decodes]
    return dataclasses.replace(plan, decodes=decodes, drafts=[told(draft) for draft in plan.drafts or ()])


def wants_logprobs(rows: Sequence[DecodePlan]) -> bool:
    return any(row.sequence.request.params.logprobs is not None for row in rows)


def row_tokens(rows: Sequence[DecodePlan], sampled: Sampled, steps: int | None) -> list[list[int]]:
    """Return the tokens of each planned row, one for each of ``steps``; None: a single step without a step axis."""
    tokens = np.asarray(sampled.tokens)
    places = [row.row for row in rows]
    chosen = tokens[None, places] if steps is None else tokens[:steps, places]
    return chosen.T.tolist()


def row_logprobs(
    rows: Sequence[DecodePlan], sampled: Sampled, tokens: list[list[int]], steps: int | None
) -> list[Sequence[PositionLogprobs]]:
    """Return log probabilities of `row_tokens`: none for a row whose request wants none."""
    each: list[Sequence[PositionLogprobs]] = [()] * len(rows)
    asking = [index for index, row in enumerate(rows) if row.sequence.request.params.logprobs is not None]
    if asking:
        places = [rows[index].row for index in asking]
        host = [np.asarray(x)[None] if steps is None else np.asarray(x)[:steps] for x in sampled.logprobs]
        most = max(rows[index].sequence.request.params.logprobs or 0 for index in asking)
        positions = _positions([np.moveaxis(x[:, places], 1, 0) for x in host], most)
        for index, of_row in zip(asking, positions, strict=True):
            top = rows[index].sequence.request.params.logprobs
            assert top is not None
            each[index] = [_record(token, top, *at) for token, at in zip(tokens[index], of_row, strict=True)]
    return each


def prompt_logprobs(plan: PrefillPlan, result: Logprobs) -> list[PositionLogprobs]:
    """Return log probabilities of each prompt token that follows a token of the chunk."""
    start, length, _ = plan.chunk
    following, top = plan.sequence.prompt[start + 1 : start + length + 1], plan.sequence.params.prompt_logprobs
    assert top is not None
    (positions,) = _positions([np.asarray(x)[None, :length] for x in result], top)
    return [_record(token, top, *at) for token, at in zip(following, positions, strict=True)]


def _positions(fields: list[np.ndarray], top: int) -> Iterator[list[tuple[float, int, list[int], list[float]]]]:
    """Convert the fields of `Logprobs` [rows, steps, ...] to rows of steps of values, with the ``top`` best tokens."""
    logprob, rank, ids, logprobs = fields
    lists = (x.tolist() for x in (logprob, rank, ids[..., :top], logprobs[..., :top]))
    return (list(zip(*row, strict=True)) for row in zip(*lists, strict=True))


def _record(token: int, top: int, logprob: float, rank: int, ids: list[int], logprobs: list[float]) -> PositionLogprobs:
    best = map(TokenLogprob, ids[:top], logprobs[:top], range(1, top + 1))
    return PositionLogprobs(TokenLogprob(token, logprob, rank), tuple(best))
