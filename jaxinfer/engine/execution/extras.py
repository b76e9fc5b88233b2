"""Outputs for training on the host: what the rows of a step ask for, and what each position returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from jaxinfer.engine.scheduling.plan import DecodePlan
from jaxinfer.sampling import Sampled
from jaxinfer.sampling.training import WIDTH, Extras, asks_of
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import PositionExtras, PositionLogprobs, RoutedExperts

_WANTS: Mapping[str, Callable[[SamplingParams], bool]] = {
    "entropy": lambda params: params.return_entropy,
    "ids": lambda params: params.logprob_token_ids is not None,
    "kept": lambda params: params.return_sampling_mask,
    "whole": lambda params: params.logprobs == -1,
    "routed": lambda params: params.return_routed_experts,
}
"""Whether a request asks for each field of `Extras`."""


def asks_of_rows(rows: Sequence[DecodePlan], count: int) -> Int32[np.ndarray, "rows asks"] | None:
    """Return what the rows of a step of ``count`` rows ask for; None: nothing, so that no transfer is needed."""
    asking = [row for row in rows if row.sequence.params.training_output is not None]
    if not asking:
        return None
    asks = np.zeros((count, WIDTH), np.int32)
    for row in asking:
        asks[row.row] = asks_of(row.sequence.params)
    return asks


def wanted_arrays(rows: Sequence[DecodePlan], sampled: Sampled) -> list[Any]:
    """Return the arrays of the extras that a row asks for."""
    if sampled.extras is None:
        return []
    params = {id(row.sequence.request): row.sequence.params for row in rows}.values()
    return [getattr(sampled.extras, name) for name, wants in _WANTS.items() if any(map(wants, params))]


def with_extras(
    rows: Sequence[DecodePlan], sampled: Sampled, logprobs: list[Sequence[PositionLogprobs]]
) -> list[Sequence[PositionLogprobs]]:
    """Return the log probabilities of the rows of one step with the extras that their requests ask for."""
    if sampled.extras is None:
        return logprobs
    host = dict[str, np.ndarray]()
    return [
        [each._replace(extras=_extras(row, sampled.extras, host)) for each in found]
        for row, found in zip(rows, logprobs, strict=True)
    ]


def with_experts(
    positions: Sequence[PositionLogprobs], routed: Int32[np.ndarray, "positions layers top_k"]
) -> list[PositionLogprobs]:
    """Return the log probabilities of prompt tokens with the experts of their forward passes."""
    pairs = zip(positions, routed, strict=True)
    return [each._replace(extras=PositionExtras(experts=_experts(rows))) for each, rows in pairs]


def _experts(routed: Int32[np.ndarray, "layers top_k"]) -> RoutedExperts:
    return RoutedExperts(len(routed), routed.tobytes())


def _extras(row: DecodePlan, extras: Extras, host: dict[str, np.ndarray]) -> PositionExtras | None:
    params, place = row.sequence.params, row.row

    def read(name: str) -> Any:
        if not _WANTS[name](params):
            return None
        if name not in host:
            host[name] = np.asarray(getattr(extras, name))
        return host[name][place]

    if not any(wants(params) for wants in _WANTS.values()):
        return None
    entropy, ids, kept, whole, routed = map(read, _WANTS)
    return PositionExtras(
        None if entropy is None else float(entropy),
        () if ids is None else tuple(ids[: len(params.logprob_token_ids or ())].tolist()),
        None if kept is None else _ids_of(kept).tobytes(),
        None if whole is None else whole.tobytes(),
        None if routed is None else _experts(routed),
    )


def _ids_of(words: Int32[np.ndarray, " words"]) -> Int32[np.ndarray, " kept"]:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).astype(np.int32)
