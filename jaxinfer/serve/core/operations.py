"""What operators change in a running engine: pauses, sleep, new weights. Messages of the two processes. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import get_args

import msgspec

from jaxinfer.engine.core import PauseMode

MODES: Sequence[str] = get_args(PauseMode)
TAGS = ("kv_cache", "weights")


class Operation(msgspec.Struct, array_like=True, tag=True):
    """A change, encoded as the array of its class name and its fields."""


class Pause(Operation):
    """See `AsyncEngine.pause`, as the others are named."""

    mode: PauseMode = "wait"


class Resume(Operation):
    pass


class AbortAll(Operation):
    pass


class Sleep(Operation):
    level: int = 1
    tags: Sequence[str] = TAGS
    mode: PauseMode = "keep"


class WakeUp(Operation):
    tags: Sequence[str] = TAGS


class UpdateWeights(Operation):
    """New weights from a folder of safetensors with the names of the model's checkpoint. ``parts``: folders with the
    tensors that it lacks."""

    path: str
    version: int | None = None
    mode: PauseMode | None = None
    parts: Sequence[str] = ()


class SetVersion(Operation):
    version: int


class Look(Operation):
    """Changes nothing. ``checksums``: of all parameters."""

    checksums: bool = False


AnyOperation = Pause | Resume | AbortAll | Sleep | WakeUp | UpdateWeights | SetVersion | Look


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightState:
    """State of an engine after an operation.

    Attributes:
        version: version of the served weights; 0: those of the start.
        paused: nothing is computed until it is resumed.
        asleep: what has no memory: "kv_cache", "weights".
        aborted: requests that `AbortAll` has ended.
        bytes, seconds: of the weights of `UpdateWeights`, and its time for placing and exchanging them.
        checksums: digest of each parameter by path, if `Look` asked for them.
    """

    version: int = 0
    paused: bool = False
    asleep: Sequence[str] = ()
    aborted: int = 0
    bytes: int = 0
    seconds: float = 0.0
    checksums: Mapping[str, str] = dataclasses.field(default_factory=dict)
