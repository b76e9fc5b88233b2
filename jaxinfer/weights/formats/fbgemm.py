"""FP8 checkpoints for FBGEMM's kernels (https://github.com/pytorch/FBGEMM), for example Llama-3.1-405B-FP8.

A weight X is ``X.weight`` float8_e4m3fn [out, in] with the multiplicative scale ``X.weight_scale`` [out, 1]. Experts
that transformers stacks in one tensor are ``X`` [experts, in, out] with ``X_scale``: [experts, 1, out] of gate and up,
[experts, out, 1] of down. Modules that were not converted have an unquantized ``X.weight``.

Inputs are rounded token by token. The scale is the token's largest magnitude, at most ``activation_scale_ub``, over
448: larger inputs are clipped to that bound.
"""

from __future__ import annotations

import numpy as np

from jaxinfer.quant.layouts import Grouped
from jaxinfer.weights.formats.fields import Fields
from jaxinfer.weights.formats.fp8 import FP8, channel_weight
from jaxinfer.weights.formats.tensors import FLOATS, RawTensors, dtype_name
from jaxinfer.weights.quantized import StoredWeight

_CODES = ("F8_E4M3",)
_END = ".weight_scale"
_STACKS = ("gate_up_proj", "down_proj")
_BOUND = 1200.0  # default of transformers if config.json gives no bound


def weights(tensors: RawTensors, config: Fields) -> dict[str, StoredWeight]:
    """Return all weights of a checkpoint, by name.

    Raises:
        CheckpointError: the configuration is unknown, or tensors do not match it.
    """
    bound = config.number("activation_scale_ub", _BOUND)
    if not bound:
        raise config.refused("activation_scale_ub", ("positive numbers",))
    layout = Grouped(FP8, 1, activations=FP8, activation_bound=bound)
    modules = tensors.modules(_END)
    found = {
        f"{module}.weight": channel_weight(tensors, module, f"{module}{_END}", layout, _CODES, "") for module in modules
    }
    stacks = [name.removesuffix("_scale") for name in tensors.ending(*(f".{kind}_scale" for kind in _STACKS))]
    return found | {name: _stack(tensors, name, bound) for name in stacks}


def _stack(tensors: RawTensors, name: str, bound: float) -> StoredWeight:
    """Return the weights of all experts, transposed to ``[experts, out, in]``."""
    experts, inputs, out = tensors.take(name, _CODES, (None, None, None)).shape
    form = (experts, 1, out) if name.endswith(_STACKS[0]) else (experts, out, 1)
    info = tensors.take(f"{name}_scale", FLOATS, form)
    parts = {
        "codes": lambda: tensors.read(name, lambda tensor: np.array(np.swapaxes(tensor, 1, 2), order="C")),
        "scales": lambda: tensors.scales(f"{name}_scale").reshape(experts, out, 1),
    }
    layout = Grouped(FP8, inputs, dtype_name(info), activations=FP8, activation_bound=bound)
    return tensors.stored((experts, out, inputs), layout, parts, (name, f"{name}_scale"))
