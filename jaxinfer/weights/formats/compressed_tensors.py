"""Checkpoints of compressed-tensors, which llm-compressor writes (https://github.com/vllm-project/compressed-tensors).

Weights belong to the groups of ``config_groups``, each with its own format:

- float-quantized, int-quantized: ``X.weight`` and ``X.weight_scale``, with "static" ``X.input_scale``;
- pack-quantized: ``X.weight_packed`` int32 [out, in * bits / 32], packed along the inputs, ``X.weight_scale`` [out,
  groups], ``X.weight_shape``; asymmetric ``X.weight_zero_point`` int32 [out * bits / 32, groups], packed along the
  outputs; with act-order ``X.weight_g_idx`` [in];
- nvfp4 and mxfp4: ``X.weight_packed`` uint8 [out, in / 2] with a scale for 16 or 32 inputs. NVFP4 also has
  ``X.weight_global_scale`` [1], a divisor of the scales.
"""

from __future__ import annotations

import numpy as np

from jaxinfer.quant.layouts import Grouped
from jaxinfer.weights.formats import mxfp4
from jaxinfer.weights.formats.columns import columns_of
from jaxinfer.weights.formats.fields import Fields
from jaxinfer.weights.formats.fp8 import CACHE_SCALES, FP8, block_weight, channel_weight
from jaxinfer.weights.formats.packing import by_rows, fields, lowered, signed
from jaxinfer.weights.formats.schemes import Scheme, Schemes
from jaxinfer.weights.formats.tensors import FLOATS, RawTensors, dtype_name, pieces
from jaxinfer.weights.quantized import StoredWeight

_WORD = 32
_PACKED, _PLAIN = ".weight_packed", ".weight_scale"


def weights(tensors: RawTensors, config: Fields) -> dict[str, StoredWeight]:
    """Return all weights of a checkpoint, by name.

    Activation quantisation that `Grouped.activations` cannot express is ignored: those activations are not rounded.

    Raises:
        CheckpointError: the configuration is unknown, or tensors do not match it.
    """
    schemes = Schemes(config)
    tensors.drop(*CACHE_SCALES)
    modules = dict.fromkeys(name[: name.rindex(".")] for name in tensors.ending(_PACKED, _PLAIN))
    return {f"{module}.weight": _weight(tensors, module, schemes.of(module)) for module in modules}


def _weight(tensors: RawTensors, module: str, scheme: Scheme) -> StoredWeight:
    tensors.drop_one(f"{module}.input_global_scale")
    codes, scales = f"{module}{_PACKED}", f"{module}{_PLAIN}"
    match scheme.format:
        case "pack-quantized":
            return _packed(tensors, module, scheme)
        case "nvfp4-pack-quantized":
            return mxfp4.nvfp4_weight(tensors, codes, scales, f"{module}.weight_global_scale", np.asarray)
        case "mxfp4-pack-quantized":
            return mxfp4.packed_weight(tensors, codes, scales)
    kind, dtype = (FP8, "F8_E4M3") if scheme.format == "float-quantized" else ("int8", "I8")
    layout = Grouped(
        kind,
        1,
        zeros=not scheme.symmetric,
        activations=scheme.activations,
        activation_group=scheme.activation_group,
        static=scheme.static,
    )
    if scheme.block is not None:
        return block_weight(tensors, module, scales, scheme.block, layout)
    return channel_weight(tensors, module, scales, layout, (dtype,), f"{module}.input_scale")


def _packed(tensors: RawTensors, module: str, scheme: Scheme) -> StoredWeight:
    codes, scales, zeros, index = (f"{module}.weight_{p}" for p in ("packed", "scale", "zero_point", "g_idx"))
    out, words = tensors.take(codes, ("I32",), (None, None)).shape
    inputs = _inputs(tensors, module, (out, words), _WORD // scheme.bits)
    groups = pieces(inputs, scheme.group or inputs)
    whole = (1,) * len(tensors.shape(scales))
    info = tensors.take(scales, FLOATS, whole if scheme.strategy == "tensor" else (out, groups))
    if not scheme.symmetric:
        tensors.take(zeros, ("I32",), (pieces(out * scheme.bits, _WORD), groups))
    columns = columns_of(tensors, inputs, scheme.group, index if index in tensors else None)
    layout = Grouped(
        codes="int8" if scheme.bits == 8 else "int4",
        group=columns.group,
        scales=dtype_name(info),
        zeros=not scheme.symmetric,
        ordered=columns.order is not None,
    )

    def unpacked(words: np.ndarray) -> np.ndarray:
        return by_rows(words, scheme.bits, inputs, columns.order)

    def read_zeros() -> np.ndarray:
        stored = tensors.read(zeros, lambda tensor: fields(tensor.T, scheme.bits)[:, :out].T)
        return columns.scales(lowered(stored, scheme.bits))

    parts = {
        "codes": lambda: signed(tensors.read(codes, unpacked), scheme.bits),
        "scales": lambda: columns.scales(tensors.scales(scales, lambda t: np.broadcast_to(t, (out, groups)))),
        "zeros": read_zeros,
        "order": lambda: np.array(columns.order),
    }
    return tensors.stored((out, inputs), layout, parts, (codes, scales))


def _inputs(tensors: RawTensors, module: str, packed: tuple[int, int], each: int) -> int:
    """Return the number of inputs, from ``weight_shape``: the last word of a row need not be full."""
    name = f"{module}.weight_shape"
    tensors.take(name, ("I64", "I32"), (2,))
    out, inputs = (int(value) for value in tensors.view(name))
    if out != packed[0] or inputs < 1 or pieces(inputs, each) != packed[1]:
        raise tensors.wrong(name, f"says [{out}, {inputs}], which {packed[0]} rows of {packed[1]} words do not hold")
    return inputs
