"""Conversion of GGUF blocks to the arrays of a layout, and to float32.

Block kinds with a codes-and-scales layout of bitwise identical values are converted to it, which saves unpacking bytes
in a product. Other blocks stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxinfer.quant import ggml
from jaxinfer.quant.layouts import Blocks, Codebook, Grouped, Layout
from jaxinfer.weights.errors import CheckpointError

# Converts uint8 [out, blocks of a row, bytes] to an array [out, ...].
Extract = Callable[[np.ndarray], np.ndarray]

_LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "Q4_0": Grouped("int4", 32, "float16"),
        "Q8_0": Grouped("int8", 32, "float16"),
        "IQ4_NL": Codebook(tuple(map(float, ggml.IQ4_VALUES)), 32, "float16"),
        "MXFP4": Codebook(ggml.E2M1_VALUES, 32, "float8_e8m0fnu"),
        "NVFP4": Codebook(ggml.E2M1_VALUES, 16, "float8_e4m3fn"),
    }
)


def layout_of(kind: str) -> Layout:
    """Return the in-memory layout for blocks of a kind."""
    return _LAYOUTS.get(kind) or Blocks(kind)


def part_of(kind: str, part: str, blocks: np.ndarray) -> np.ndarray:
    """Return an array of the kind's layout, in a new buffer.

    Args:
        blocks: uint8 [out, blocks of a row, bytes].

    Raises:
        CheckpointError: a scale is NaN.
    """
    extract: Extract = np.array if part == "blocks" else _PARTS[kind, part]
    return extract(blocks)


def numbers(kind: str, blocks: np.ndarray) -> np.ndarray:
    """Dequantize blocks to float32 [out, in]."""
    values = ggml.KINDS[kind].dequantize(jnp.asarray(np.ascontiguousarray(blocks)))
    return np.asarray(values).reshape(blocks.shape[0], -1)


def _rows(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(values.shape[0], -1)


def _halves(blocks: np.ndarray) -> np.ndarray:
    return _rows(np.ascontiguousarray(blocks[..., :2]).view("<f2"))


def _nibbles(data: np.ndarray, width: int) -> np.ndarray:
    """Unpack the nibbles of each ``width`` bytes, all low ones before all high ones."""
    groups = data.reshape(*data.shape[:-1], -1, 1, width)
    return np.concatenate([groups & 15, groups >> 4], axis=-2)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _rows(_nibbles(blocks[..., 2:], 16).astype(np.int8) - 8).astype(ml_dtypes.int4)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _rows(np.ascontiguousarray(blocks[..., 2:]).view(np.int8))


def _codes(begin: int, width: int) -> Extract:
    def extract(blocks: np.ndarray) -> np.ndarray:
        return _rows(_nibbles(blocks[..., begin:], width)).astype(ml_dtypes.uint4)

    return extract


def _powers(blocks: np.ndarray) -> np.ndarray:
    exponents = _rows(blocks[..., :1])
    if (exponents == 255).any():
        raise CheckpointError("scales of MXFP4 that are no numbers")
    return exponents.view(ml_dtypes.float8_e8m0fnu)


def _unsigned_floats(blocks: np.ndarray) -> np.ndarray:
    scales = _rows(blocks[..., :4])
    if (scales > 127).any():
        raise CheckpointError("scales of NVFP4 that are below 0")
    # ggml reads this NaN as 0
    return np.where(scales == 127, np.uint8(0), scales).view(ml_dtypes.float8_e4m3fn)


_PARTS: Mapping[tuple[str, str], Extract] = MappingProxyType(
    {
        ("Q4_0", "codes"): _q4_0,
        ("Q4_0", "scales"): _halves,
        ("Q8_0", "codes"): _q8_0,
        ("Q8_0", "scales"): _halves,
        ("IQ4_NL", "codes"): _codes(2, 16),
        ("IQ4_NL", "scales"): _halves,
        ("MXFP4", "codes"): _codes(1, 16),
        ("MXFP4", "scales"): _powers,
        ("NVFP4", "codes"): _codes(4, 8),
        ("NVFP4", "scales"): _unsigned_floats,
    }
)
