"""Deferred parameters, for callers that process one parameter at a time and keep none."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxinfer.types import ParamSpec
from jaxinfer.weights.tree import Fill, Path, Place, dtype_of


@dataclasses.dataclass(frozen=True, eq=False)
class Deferred:
    """An array of a checkpoint that is read anew on every conversion to numpy."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Fill

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        value = self.fill(())
        return value if dtype is None else value.astype(dtype, copy=False)


def deferred(dtype: np.dtype[Any]) -> Place:
    """Return a ``place`` for `load_params` that leaves every parameter unread. ``dtype``: dtype of the model."""

    def place(path: Path, spec: ParamSpec, fill: Fill) -> Deferred:
        del path
        return Deferred(spec.shape, dtype_of(spec, dtype), fill)

    return place
