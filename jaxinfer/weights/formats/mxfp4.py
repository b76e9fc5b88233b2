"""MXFP4 experts in the format of gpt-oss (OCP Microscaling Formats 1.0: 32 4-bit floats share a power of two).

`packed_weight` and `nvfp4_weight` read matrices of 4-bit floats, which other formats have under names of their own.

A stack of weights X is ``X_blocks`` uint8 [experts, out, in / 32, 16], adjacent pairs with the first in the low nibble,
and ``X_scales`` uint8 [experts, out, in / 32], exponents with a bias of 127.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxinfer.quant.ggml import E2M1_VALUES
from jaxinfer.quant.layouts import Codebook
from jaxinfer.weights.formats.fields import Fields
from jaxinfer.weights.formats.fp8 import FP8
from jaxinfer.weights.formats.packing import nibbles
from jaxinfer.weights.formats.tensors import POWERS, RawTensors
from jaxinfer.weights.quantized import StoredWeight

GROUP, NVFP4_GROUP = 32, 16
LAYOUT = Codebook(E2M1_VALUES, GROUP, POWERS.name)
_NVFP4 = Codebook(E2M1_VALUES, NVFP4_GROUP, FP8, divided=True)
_END = "_blocks"


def weights(tensors: RawTensors, config: Fields) -> dict[str, StoredWeight]:
    """Return all weights of a checkpoint, by name.

    Raises:
        CheckpointError: tensors do not match the format.
    """
    del config
    return {name: _weight(tensors, name) for name in tensors.modules(_END)}


def _weight(tensors: RawTensors, name: str) -> StoredWeight:
    codes, scales = f"{name}_blocks", f"{name}_scales"
    experts, out, groups, _ = tensors.take(codes, ("U8",), (None, None, None, GROUP // 2)).shape
    tensors.take(scales, ("U8",), (experts, out, groups))
    parts = {
        "codes": lambda: tensors.read(codes, nibbles).reshape(experts, out, groups * GROUP),
        "scales": lambda: tensors.scales(scales, lambda tensor: tensor.copy().view(POWERS)),
    }
    return tensors.stored((experts, out, groups * GROUP), LAYOUT, parts, (codes, scales))


def packed_weight(tensors: RawTensors, codes: str, scales: str) -> StoredWeight:
    """Return MXFP4 ``[out, in]`` from codes uint8 ``[out, in / 2]`` and exponents uint8 ``[out, in / 32]``."""
    shape = _packed_shape(tensors, codes, scales, GROUP, "U8")
    parts = {
        "codes": lambda: tensors.read(codes, nibbles),
        "scales": lambda: tensors.scales(scales, lambda tensor: tensor.copy().view(POWERS)),
    }
    return tensors.stored(shape, LAYOUT, parts, (codes, scales))


def nvfp4_weight(
    tensors: RawTensors, codes: str, scales: str, whole: str, divisor: Callable[[np.ndarray], np.ndarray]
) -> StoredWeight:
    """Return NVFP4 ``[out, in]`` from codes uint8 ``[out, in / 2]`` and scales float8_e4m3fn ``[out, in / 16]``.

    Args:
        whole: name of the scale of the whole weight.
        divisor: returns the divisor of the scales, given the scale of the whole weight.
    """
    shape = _packed_shape(tensors, codes, scales, NVFP4_GROUP, "F8_E4M3")
    tensors.take_one(whole, ("F32",))
    parts = {
        "codes": lambda: tensors.read(codes, nibbles),
        "scales": lambda: tensors.scales(scales),
        "divisor": lambda: np.full((shape[0], 1), divisor(tensors.one(whole, positive=True)), np.float32),
    }
    return tensors.stored(shape, _NVFP4, parts, (codes, scales, whole))


def _packed_shape(tensors: RawTensors, codes: str, scales: str, group: int, dtype: str) -> tuple[int, int]:
    """Take codes with two values in a byte, and their scales; return the shape of the weight."""
    out, half = tensors.take(codes, ("U8",), (None, None)).shape
    if half * 2 % group:
        raise tensors.wrong(codes, f"has {half * 2} inputs, which are no groups of {group}")
    tensors.take(scales, (dtype,), (out, half * 2 // group))
    return out, half * 2
