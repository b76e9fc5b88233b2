"""Errors of the weights package, and helpers that format names for messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.sampling_params import RequestError

_LONGEST = 120


class CheckpointError(ValueError):
    """Error for a model folder that cannot be loaded. The message is one user-facing sentence."""


class WeightsError(RequestError):
    """Error for weights of a trainer that do not fit a model. The message is one user-facing sentence.

    Attributes:
        name: the array, as the trainer names it.
        expected, given: its shape or dtype in the model and in the weights; None: the one has no such array.
    """

    def __init__(self, message: str, name: str, expected: Any = None, given: Any = None) -> None:
        super().__init__(None, message)
        self.field = name
        self.name, self.expected, self.given = name, expected, given


def quoted(name: str) -> str:
    """Format a name from an untrusted file for a message: control characters escaped, about 120 characters at most."""
    return repr(name if len(name) <= _LONGEST else name[:_LONGEST] + "...")


def listed(names: list[str], most: int = 5) -> str:
    """Return the first ``most`` names, quoted, and the number of names left out."""
    first = ", ".join(quoted(name) for name in names[:most])
    return first if len(names) <= most else f"{first} and {len(names) - most} more"


def shape_text(shape: Sequence[int | None]) -> str:
    """Format a shape; None is any extent."""
    return f"[{', '.join('*' if size is None else str(size) for size in shape)}]"
