"""Groups of inputs that share a scale: in the inputs' order, or as an index says (act-order)."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxinfer.weights.formats.tensors import RawTensors, pieces

INDICES = ("I32", "I64")


@dataclasses.dataclass(frozen=True)
class Columns:
    """Groups of the columns of a weight.

    Attributes:
        group: that many neighbours share a scale: what divides both the file's groups and the inputs, where the last
            group of the file is a shorter one.
        scale: for each of these, which of the file's groups it belongs to.
        order: at which input a column stands, sorted by groups; None: columns stand as inputs do.
    """

    group: int
    scale: np.ndarray
    order: np.ndarray | None

    def scales(self, stored: np.ndarray) -> np.ndarray:
        """Scales or zeros ``[out, groups of the file]`` as ``[out, in / group]``, a copy."""
        return np.ascontiguousarray(stored[:, self.scale])


def size_of(tensors: RawTensors, scales: str, inputs: int, size: int | None) -> int:
    """Inputs that share a scale, 0 for all: as the configuration says, or as many as there are scales for.

    Raises:
        CheckpointError: it says nothing, and the scales are not of equal groups.
    """
    if size is not None:
        return size
    groups = (tensors.shape(scales) or (1,))[0]
    if not groups or inputs % groups:
        raise tensors.wrong(scales, f"is of {groups} groups of {inputs} inputs, and group_size is absent")
    return inputs // groups


def columns_of(tensors: RawTensors, inputs: int, size: int, index: str | None = None) -> Columns:
    """Groups of ``size`` inputs (0: of all).

    Args:
        index: name of a tensor ``[in]`` that says each input's group; it must give ``size`` inputs to each.

    Raises:
        CheckpointError: the index is not such a tensor.
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
    if np.array_equal(groups, plain) or not groups.any():  # all 0: a file of neighbours, whose writer left it empty
        return None
    many = pieces(inputs, size)
    if groups.min() < 0 or groups.max() >= many:
        raise tensors.wrong(index, f"names groups {groups.min()} to {groups.max()} where there are 0 to {many - 1}")
    if not np.array_equal(np.bincount(groups, minlength=many), np.bincount(plain)):
        raise tensors.wrong(index, f"does not give {size} inputs to each group")
    return np.argsort(groups, kind="stable").astype(np.int32)
