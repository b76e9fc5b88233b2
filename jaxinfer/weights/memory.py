"""In-memory tensors with the interface of a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.types import ParamTree
from jaxinfer.weights.formats import quantized_weights
from jaxinfer.weights.load import deferred, load_params
from jaxinfer.weights.quantized import StoredCheckpoint, storages
from jaxinfer.weights.safetensors.reader import TensorInfo
from jaxinfer.weights.safetensors.writer import CODES
from jaxinfer.weights.tree import target_dtype


@dataclasses.dataclass(frozen=True)
class InMemoryCheckpoint:
    """A checkpoint of in-memory tensors that was never written to disk.

    Attributes:
        folder: the path used in messages.
        arrays: the tensors by name, of dtypes that safetensors supports.
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
        """Do nothing: tensors are already in memory."""

    def release(self, name: str) -> None:
        """Do nothing: a tensor lives as long as its checkpoint."""


def as_loaded(
    checkpoint: InMemoryCheckpoint, specs: ParamTree, config_json: Mapping[str, Any], dtype: str
) -> tuple[ParamTree, dict[str, Any]]:
    """Load tensors as if from a folder that holds them and this config.json.

    Args:
        specs: all parameters that the tensors fill.
        config_json: its ``quantization_config`` describes how tensors are stored; without it they are unquantized.
        dtype: dtype of the model.

    Returns:
        The specs with quantised storages, and their arrays as `jaxinfer.weights.load.Deferred`.

    Raises:
        CheckpointError: see `quantized_weights`, `storages` and `load_params`.
    """
    weights, consumed = quantized_weights(checkpoint, config_json)
    stored = storages(specs, weights, dtype)
    tensors = StoredCheckpoint(checkpoint, weights, frozenset(consumed), stored)
    return stored, load_params(tensors, stored, dtype, deferred(target_dtype(dtype)))
