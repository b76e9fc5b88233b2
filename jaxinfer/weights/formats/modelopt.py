"""Checkpoints exported by NVIDIA's ModelOpt (https://github.com/NVIDIA/TensorRT-Model-Optimizer).

- FP8: ``X.weight`` float8_e4m3fn [out, in], ``X.weight_scale`` [] or [out], ``X.input_scale`` [];
- FP8_PER_CHANNEL_PER_TOKEN: the same tensors, with inputs scaled per token;
- NVFP4: ``X.weight`` uint8 [out, in / 2], two E2M1 per byte, ``X.weight_scale`` float8_e4m3fn [out, in / 16],
  multiplied by ``X.weight_scale_2`` []. Inputs are not rounded: ``X.input_scale`` is unused.

Excluded modules have an unquantized ``X.weight``.
"""

from __future__ import annotations

import numpy as np

from jaxinfer.quant.layouts import Grouped
from jaxinfer.weights.formats.fields import Fields
from jaxinfer.weights.formats.fp8 import CACHE_SCALES, FP8, channel_weight
from jaxinfer.weights.formats.mxfp4 import nvfp4_weight
from jaxinfer.weights.formats.tensors import RawTensors
from jaxinfer.weights.quantized import StoredWeight

_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4")
_SCALE, _SECOND = ".weight_scale", ".weight_scale_2"


def weights(tensors: RawTensors, config: Fields) -> dict[str, StoredWeight]:
    """Return all weights of a checkpoint, by name.

    Raises:
        CheckpointError: the configuration is unknown, or tensors do not match it.
    """
    algorithm = config.choice("quant_algo", _ALGORITHMS)
    tensors.drop(*CACHE_SCALES)
    modules = tensors.modules(_SCALE)
    return {f"{module}.weight": _weight(tensors, module, algorithm) for module in modules}


def _weight(tensors: RawTensors, module: str, algorithm: str) -> StoredWeight:
    if algorithm.endswith("NVFP4"):
        tensors.drop_one(f"{module}.input_scale")
        whole = f"{module}{_SECOND}"
        return nvfp4_weight(
            tensors, f"{module}.weight", f"{module}{_SCALE}", whole, lambda scale: np.float32(1) / scale
        )
    inputs = f"{module}.input_scale"
    layout = Grouped(FP8, 1, activations=FP8, static=algorithm == "FP8" and inputs in tensors)
    return channel_weight(tensors, module, f"{module}{_SCALE}", layout, ("F8_E4M3",), inputs)
