"""Checkpoints whose weights are stored quantised: what an adapter of a format says of each, and one face for all.

An adapter (jaxinfer/weights/formats) reads the tensors of one format and gives a `StoredWeight` for each quantised
weight. `quantised` then turns a family's parameters, which name plain tensors, into parameters that are made of the
stored parts; the checkpoint that goes with them has these parts as tensors, so that they are loaded as all others are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxinfer.quant.layouts import Layout


@dataclasses.dataclass(frozen=True)
class StoredWeight:
    """A weight as a checkpoint stores it, turned to ``[*stack, out, in]`` whatever the format has.

    Attributes:
        shape: ``[*stack, out, in]``: a stack of matrices where the format has one tensor for all experts.
        layout: how its values are to lie in memory.
        read: the array of a part by its name, ``[*stack, out, *part.shape]`` (an input part: ``[*part.shape]``), in
            the part's dtype, in a new buffer. It may raise CheckpointError.
        nbytes: that it takes in the checkpoint.
        inputs_digest: equal for two weights of one layout whose input parts are equal: they can be fused.
    """

    shape: tuple[int, ...]
    layout: Layout
    read: Callable[[str], np.ndarray]
    nbytes: int
    inputs_digest: str = ""
