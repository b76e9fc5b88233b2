"""Quantised checkpoints for the tests: small handmade ones, and their dequantised weights."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.weights import open_checkpoint
from jaxinfer.weights.formats import quantized_weights
from jaxinfer.weights.quantized import StoredWeight
from jaxinfer.weights.safetensors.reader import DTYPES
from tests.weights.files import write_raw

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def save(folder: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Save a safetensors file of any supported dtype, including 8-bit floats."""
    header, data = {}, b""
    for name, value in tensors.items():
        raw = np.ascontiguousarray(value).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": offsets}
        data += raw
    write_raw(folder / "model.safetensors", header, data)


def weights_of(
    folder: pathlib.Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> tuple[Mapping[str, StoredWeight], set[str]]:
    """Write a checkpoint and return its stored weights and the names of the tensors consumed."""
    save(folder, tensors)
    return quantized_weights(open_checkpoint(folder), {"quantization_config": config})


def config_of(folder: pathlib.Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def numbers(weight: StoredWeight) -> np.ndarray:
    """Return a weight dequantised to float32, columns in input order, after checking its arrays against its layout."""
    layout, inputs = weight.layout, weight.shape[-1]
    arrays = {}
    for name, part in layout.parts(inputs).items():
        array = weight.read(name)
        arrays[name] = jnp.asarray(array)
        assert (array.shape, array.dtype.name) == ((*weight.shape[:-1], *part.shape), part.dtype), name
        assert array.flags.writeable, name
    result = np.asarray(layout.dequantize(arrays))
    for name, part in layout.input_parts(inputs).items():
        array = weight.read(name)
        assert (array.shape, array.dtype.name) == (part.shape, part.dtype), name
        if name == "order":
            result = result[..., np.argsort(array)]
    assert result.shape == weight.shape
    return result


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack integers [rows, fields] into int32 words [rows, words]: each row is one little-endian bit stream."""
    rows = []
    for row in values.tolist():
        stream = sum(value << (bits * place) for place, value in enumerate(row))
        size = -(-len(row) * bits // 32) * 4
        rows.append(np.frombuffer(stream.to_bytes(size, "little"), "<i4"))
    return np.stack(rows)
