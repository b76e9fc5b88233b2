"""Outputs for training in answers: arrays of an output, as lists for JSON. No jax."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from typing import Any

from jaxinfer.types import PositionExtras, PositionLogprobs, RoutedExperts, experts_of


def kept_ids(extras: PositionExtras) -> list[int]:
    """Return the token ids that the sampler could draw; none where these were not requested."""
    return array("i", extras.kept or b"").tolist()


def arrays_json(positions: Sequence[PositionLogprobs], lowest: float) -> dict[str, Any]:
    """Return the arrays of an output, or of a part of it, by the names of `jaxinfer.outputs.TokenArrays`. Those of the
    whole vocabulary are float32, little-endian, in base64: one text for each position, also with infinities.

    Args:
        lowest: replaces smaller log probabilities: JSON has no infinity.
    """
    extras = [position.extras or PositionExtras() for position in positions]
    found: dict[str, Any] = {"logprobs": [max(position.chosen.logprob, lowest) for position in positions]}
    if extras and extras[0].entropy is not None:
        found["entropies"] = [each.entropy for each in extras]
    if extras and extras[0].token_logprobs:
        found["token_logprobs"] = [[max(value, lowest) for value in each.token_logprobs] for each in extras]
    if extras and extras[0].kept is not None:
        indptr, indices = [0], list[int]()
        for each in extras:
            indices += kept_ids(each)
            indptr.append(len(indices))
        found["sampling_mask"] = {"indptr": indptr, "indices": indices}
    if extras and extras[0].vocabulary is not None:
        found["vocabulary"] = [base64.b64encode(each.vocabulary or b"").decode() for each in extras]
    if experts := experts_of(positions):
        found["routed_experts"] = list(map(expert_ids, experts))
    return found


def expert_ids(experts: RoutedExperts) -> list[list[int]]:
    """Return the ids of the experts of each layer."""
    ids = array("i", experts.ids).tolist()
    top = len(ids) // experts.layers
    return [ids[first : first + top] for first in range(0, len(ids), top)]
