"""Checkpoints exported by NVIDIA's ModelOpt (https://github.com/NVIDIA/TensorRT-Model-Optimizer).

- FP8: ``X.weight`` float8_e4m3fn [out, in], ``X.weight_scale`` [] or [out], ``X.input_scale`` [];
- FP8_PER_CHANNEL_PER_TOKEN: the same tensors, with inputs scaled per token;
- NVFP4: ``X.weight`` uint8 [out, in / 2], two E2M1 per byte, ``X.weight_scale`` float8_e4m3fn [out, in / 16],
  multiplied by ``X.weight_scale_2`` []. Inputs are not rounded: ``X.input_scale`` is unused.

Excluded modules have an unquantized ``X.weight``.
"""

from __future__ import annotations

import numpy as np

from jaxinfer.quant.layouts import Codebook, Grouped
from jaxinfer.weights.formats.fields import Fields
from jaxinfer.weights.formats.fp8 import CACHE_SCALES, FP8, channel_weight
from jaxinfer.weights.formats.packing import nibbles
from jaxinfer.weights.formats.tensors import E2M1, RawTensors
from jaxinfer.weights.quantized import StoredWeight

_GROUP = 16
_NVFP4 = Codebook(E2M1, _GROUP, FP8, divided=True)
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4")
_SCALE, _SECOND = ".weight_scale", ".weight_scale_2"


def weights(tensors: RawTensors, config: Fields) -> dict[str, StoredWeight]:
    """Return all weights of a checkpoint, by name.

    Raises:
        CheckpointError: the configuration is unknown, or tensors do not match it.
    """
    algorithm = config.choice("quant_algo", _ALGORITHMS)
    tensors.drop(*CACHE_SCALES)
    modules = [name.removesuffix(_SCALE) for name in tensors.ending(_SCALE)]
    return {f"{module}.weight": _weight(tensors, module, algorithm) for module in modules}


def _weight(tensors: RawTensors, module: str, algorithm: str) -> StoredWeight:
    if algorithm.endswith("NVFP4"):
        tensors.drop_one(f"{module}.input_scale")
        return _nvfp4(tensors, module)
    inputs = f"{module}.input_scale"
    layout = Grouped(FP8, 1, activations=FP8, static=algorithm == "FP8" and inputs in tensors)
    return channel_weight(tensors, module, f"{module}{_SCALE}", layout, ("F8_E4M3",), inputs)


def _nvfp4(tensors: RawTensors, module: str) -> StoredWeight:
    codes, scales, whole = f"{module}.weight", f"{module}{_SCALE}", f"{module}{_SECOND}"
    out, half = tensors.take(codes, ("U8",), (None, None)).shape
    if half * 2 % _GROUP:
        raise tensors.wrong(codes, f"has {half * 2} inputs, which are no groups of {_GROUP}")
    tensors.take(scales, ("F8_E4M3",), (out, half * 2 // _GROUP))
    tensors.take_one(whole, ("F32",))
    parts = {
        "codes": lambda: tensors.read(codes, nibbles),
        "scales": lambda: tensors.scales(scales),
        "divisor": lambda: np.full((out, 1), np.float32(1) / tensors.one(whole, positive=True), np.float32),
    }
    return tensors.stored((out, half * 2), _NVFP4, parts, (codes, scales, whole))
