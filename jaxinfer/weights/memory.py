"""Tensors in memory that are read as a checkpoint's are."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.types import ParamTree
from jaxinfer.weights.formats import quantized_weights
from jaxinfer.weights.lazy import deferred
from jaxinfer.weights.load import load_params
from jaxinfer.weights.quantized import StoredCheckpoint, storages
from jaxinfer.weights.safetensors.reader import TensorInfo
from jaxinfer.weights.safetensors.writer import CODES
from jaxinfer.weights.tree import target_dtype


@dataclasses.dataclass(frozen=True)
class InMemoryCheckpoint:
    """A checkpoint of tensors in memory that was never written.

    Attributes:
        folder: what messages name.
        arrays: the tensors by name, of dtypes that safetensors has.
    """

    folder: pathlib.Path
    arrays: Mapping[str, np.ndarray]

    @functools.cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {
            name: TensorInfo(name, CODES[tensor.dtype], tensor.shape, 0, tensor.nbytes)
            for name, tensor in self.arrays.items()
        }

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def expect(self, name: str, part: np.ndarray) -> None:
        """Do nothing: tensors are in memory."""

    def release(self, name: str) -> None:
        """Do nothing: a tensor stays as long as its checkpoint."""


def as_loaded(
    checkpoint: InMemoryCheckpoint, specs: ParamTree, config_json: Mapping[str, Any], dtype: str
) -> tuple[ParamTree, dict[str, Any]]:
    """Load tensors as a folder of them and of this config.json would be loaded.

    Args:
        specs: the parameters that the tensors fill, all of them.
        config_json: its ``quantization_config`` says how tensors are stored; without one they are plain numbers.
        dtype: the model's.

    Returns:
        the parameters with storages, and their arrays as `jaxinfer.weights.lazy.Deferred`.

    Raises:
        CheckpointError: see `quantized_weights`, `storages` and `load_params`.
    """
    weights, consumed = quantized_weights(checkpoint, config_json)
    stored = storages(specs, weights, dtype)
    tensors = StoredCheckpoint(checkpoint, weights, frozenset(consumed), stored)
    return stored, load_params(tensors, stored, dtype, deferred(target_dtype(dtype)))
