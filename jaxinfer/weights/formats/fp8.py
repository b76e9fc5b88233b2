"""FP8 checkpoints in the format of DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 3.3) and of transformers.

A weight X is ``X`` float8_e4m3fn [out, in] with ``X_scale_inv``, a multiplicative scale despite its name: [ceil(out /
rows), ceil(in / columns)] for blocks, where the last blocks may be partial, or a single value. Scales of format "ue8m0"
are powers of two, which some files store as exponents.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxinfer.quant.layouts import Grouped
from jaxinfer.weights.formats.fields import Fields
from jaxinfer.weights.formats.tensors import FLOATS, POWERS, RawTensors, dtype_name, pieces, spread
from jaxinfer.weights.quantized import StoredWeight
from jaxinfer.weights.safetensors.reader import TensorInfo

FP8 = "float8_e4m3fn"
# Scales of an 8-bit KV cache from calibration.
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale")
_CODES = ("F8_E4M3",)
_POWERS = ("F8_E8M0", "U8")
_SCALES = ("weight_scale_inv", "weight_scale")
_INPUT_SCALES = ("input_scale", "activation_scale")


def weights(tensors: RawTensors, config: Fields) -> dict[str, StoredWeight]:
    """Return all weights of a checkpoint, by name.

    Raises:
        CheckpointError: the configuration is unknown, or tensors do not match it.
    """
    block = config.block("weight_block_size")
    schemes = ("dynamic", "static") if block is None else ("dynamic",)
    static = config.choice("activation_scheme", schemes, "dynamic") == "static"
    tensors.drop(*CACHE_SCALES)
    found = {}
    for kind in _SCALES:
        for scales in tensors.ending(f".{kind}"):
            module = scales.removesuffix(f".{kind}")
            found[f"{module}.weight"] = _weight(tensors, module, scales, block, static)
    return found


def _weight(tensors: RawTensors, module: str, scales: str, block: tuple[int, int] | None, static: bool) -> StoredWeight:
    if block is not None:
        return block_weight(tensors, module, scales, block, Grouped(FP8, 1, activations=FP8, activation_group=block[1]))
    inputs = next((name for kind in _INPUT_SCALES if (name := f"{module}.{kind}") in tensors), f"{module}.input_scale")
    layout = Grouped(FP8, 1, activations=FP8, static=static)
    return channel_weight(tensors, module, scales, layout, _CODES, inputs)


def block_weight(
    tensors: RawTensors, module: str, scales: str, block: tuple[int, int], layout: Grouped
) -> StoredWeight:
    """Return a weight ``[out, in]`` with scales for blocks of rows and columns.

    Args:
        layout: its layout, except the group and the dtype of the scales.

    Raises:
        CheckpointError: tensors do not match the format.
    """
    codes = f"{module}.weight"
    out, inputs = tensors.take(codes, _CODES, (None, None)).shape
    grid = (pieces(out, block[0]), pieces(inputs, block[1]))
    info = tensors.take(scales, (*FLOATS, *_POWERS), grid)
    # a divisor of both the block and the inputs, so that a partial block at the edge has whole groups
    group = math.gcd(min(block[1], inputs), inputs)
    dtype = POWERS.name if info.dtype in _POWERS else dtype_name(info)

    def rows(tensor: np.ndarray) -> np.ndarray:
        return spread(tensor.view(POWERS) if info.dtype == "U8" else tensor, block, (out, inputs), group)

    parts = {"codes": lambda: tensors.read(codes), "scales": lambda: tensors.scales(scales, rows)}
    layout = dataclasses.replace(layout, group=group, scales=dtype)
    return tensors.stored((out, inputs), layout, parts, (codes, scales))


def channel_weight(
    tensors: RawTensors, module: str, scales: str, layout: Grouped, dtypes: tuple[str, ...], input_scale: str
) -> StoredWeight:
    """Return a weight ``[out, in]`` with a scale for each output or a single one.

    Args:
        layout: its layout, except the group and the dtype of the scales.
        dtypes: allowed dtypes of the stored codes.
        input_scale: name of the tensor with the scale of the inputs, used if the layout is static.

    Raises:
        CheckpointError: tensors do not match the format.
    """
    codes = f"{module}.weight"
    out, inputs = tensors.take(codes, dtypes, (None, None)).shape
    info = _take_scales(tensors, scales, out)
    if layout.static:
        tensors.take_one(input_scale, FLOATS)

    def channels(tensor: np.ndarray) -> np.ndarray:
        return np.array(np.broadcast_to(tensor.reshape(-1, 1), (out, 1)))

    parts = {
        "codes": lambda: tensors.read(codes),
        "scales": lambda: tensors.scales(scales, channels),
        "zeros": lambda: tensors.read(f"{module}.weight_zero_point", channels),
        "input_scale": lambda: tensors.one(input_scale, positive=True),
    }
    if layout.zeros:
        tensors.take(f"{module}.weight_zero_point", ("I8",), info.shape)
    layout = dataclasses.replace(layout, group=inputs, scales=dtype_name(info))
    return tensors.stored((out, inputs), layout, parts, (codes, scales))


def _take_scales(tensors: RawTensors, name: str, out: int) -> TensorInfo:
    """Take scales, one for each output or a single one: ``[out, 1]``, ``[out]``, ``[1]`` or ``[]``."""
    stored = tensors.shape(name)
    channels = 1 if stored[:1] == (1,) else out
    return tensors.take(name, FLOATS, (channels, 1)[: len(stored)])
