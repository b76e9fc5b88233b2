"""Scale groups along the inputs: contiguous, or assigned by an index (act-order)."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxinfer.weights.formats.tensors import RawTensors, pieces

INDICES = ("I32", "I64")


@dataclasses.dataclass(frozen=True)
class Columns:
    """Scale groups of a weight's columns.

    Attributes:
        group: adjacent columns that share a scale: a divisor of both the file's group size and the number of inputs, as
            the last group of the file may be shorter.
        scale: index of the file's group of each of these groups.
        order: input index of each column, sorted by group; None: columns are in input order.
    """

    group: int
    scale: np.ndarray
    order: np.ndarray | None

    def scales(self, stored: np.ndarray) -> np.ndarray:
        """Expand scales or zero points ``[out, groups of the file]`` to ``[out, in / group]``, a copy."""
        return np.ascontiguousarray(stored[:, self.scale])


def size_of(tensors: RawTensors, scales: str, inputs: int, size: int | None) -> int:
    """Return the group size in inputs, 0 for all: from the configuration, else from the number of scales.

    Raises:
        CheckpointError: the configuration gives none, and the scales do not divide the inputs into equal groups.
    """
    if size is not None:
        return size
    groups = (tensors.shape(scales) or (1,))[0]
    if not groups or inputs % groups:
        raise tensors.wrong(scales, f"is of {groups} groups of {inputs} inputs, and group_size is absent")
    return inputs // groups


def columns_of(tensors: RawTensors, inputs: int, size: int, index: str | None = None) -> Columns:
    """Return the groups of ``size`` inputs (0: one group of all).

    Args:
        index: name of a tensor ``[in]`` with the group of each input; each group must have ``size`` inputs.

    Raises:
        CheckpointError: the index is invalid.
    """
    size = min(size or inputs, inputs)
    group = math.gcd(size, inputs)
    scale = np.arange(0, inputs, group) // size
    order = None if index is None else _order(tensors, index, inputs, size)
    return Columns(group, scale, order)


def _order(tensors: RawTensors, index: str, inputs: int, size: int) -> np.ndarray | None:
    tensors.take(index, INDICES, (inputs,))
    groups = tensors.read(index)
    plain = np.arange(inputs) // size
    if np.array_equal(groups, plain) or not groups.any():  # all 0: contiguous groups, index left unset by the writer
        return None
    many = pieces(inputs, size)
    if groups.min() < 0 or groups.max() >= many:
        raise tensors.wrong(index, f"names groups {groups.min()} to {groups.max()} where there are 0 to {many - 1}")
    if not np.array_equal(np.bincount(groups, minlength=many), np.bincount(plain)):
        raise tensors.wrong(index, f"does not give {size} inputs to each group")
    return np.argsort(groups, kind="stable").astype(np.int32)
