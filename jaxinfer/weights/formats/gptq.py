"""GPTQ checkpoints of AutoGPTQ and GPTQModel, versions 1 and 2 (Frantar et al. 2022, https://arxiv.org/abs/2210.17323).

A weight X is ``X.qweight`` int32 [in * bits / 32, out], packed along the inputs; ``X.qzeros`` int32
[groups, out * bits / 32], packed along the outputs; ``X.scales`` [groups, out]; and ``X.g_idx`` int32 [in]:
weight[i, o] = scales[g, o] * (code[i, o] - zero[g, o]) with g = g_idx[i].
"""

from __future__ import annotations

import numpy as np

from jaxinfer.quant.layouts import Grouped
from jaxinfer.weights.formats.columns import columns_of
from jaxinfer.weights.formats.fields import Fields
from jaxinfer.weights.formats.packing import by_rows, fields, lowered, signed, transposed
from jaxinfer.weights.formats.tensors import FLOATS, RawTensors, dtype_name, pieces
from jaxinfer.weights.quantized import StoredWeight

_BITS = (2, 3, 4, 8)
_END = ".qweight"
_WORD = 32


def weights(tensors: RawTensors, config: Fields) -> dict[str, StoredWeight]:
    """All weights of a checkpoint, by name.

    Raises:
        CheckpointError: the configuration is not a known one, or tensors do not fit it.
    """
    bits = config.choice("bits", _BITS)
    size = config.group_size("group_size", -1)
    config.choice("pack_dtype", ("int32",), "int32")
    first = config.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq"
    if config.values.get("dynamic"):
        raise config.refused("dynamic", ("null",))
    if config.flag("is_marlin_format", False):
        raise config.refused("is_marlin_format", ("false",))
    symmetric = config.flag("sym", False)
    modules = [name.removesuffix(_END) for name in tensors.ending(_END)]
    return {f"{module}.weight": _weight(tensors, module, bits, size, symmetric, first) for module in modules}


def _weight(tensors: RawTensors, module: str, bits: int, size: int, symmetric: bool, first: bool) -> StoredWeight:
    codes, zeros, scales, index = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    words, out = tensors.take(codes, ("I32",), (None, None)).shape
    if words * _WORD % bits:
        raise tensors.wrong(codes, f"has {words} rows, which do not hold whole fields of {bits} bits")
    inputs = words * _WORD // bits
    groups = pieces(inputs, size or inputs)
    info = tensors.take(scales, FLOATS, (groups, out))
    tensors.take(zeros, ("I32",), (groups, pieces(out * bits, _WORD)))
    columns = columns_of(tensors, inputs, size, index if index in tensors else None)
    layout = Grouped(
        codes="int8" if bits == 8 else "int4",
        group=columns.group,
        scales=dtype_name(info),
        zeros=not symmetric,
        ordered=columns.order is not None,
    )

    def read_zeros() -> np.ndarray:
        stored = tensors.read(zeros, lambda tensor: _zeros(tensor, bits, out, first))
        return columns.scales(np.ascontiguousarray(stored.T))

    def read_scales() -> np.ndarray:
        if symmetric and read_zeros().any():
            raise tensors.wrong(zeros, "holds zero points although quantization_config.sym is true")
        return columns.scales(tensors.scales(scales, transposed))

    parts = {
        "codes": lambda: signed(tensors.read(codes, lambda t: by_rows(t.T, bits, inputs, columns.order)), bits),
        "scales": read_scales,
        "zeros": read_zeros,
        "order": lambda: np.array(columns.order),
    }
    return tensors.stored((out, inputs), layout, parts, (codes, zeros, scales))


def _zeros(words: np.ndarray, bits: int, out: int, first: bool) -> np.ndarray:
    """Zero points [groups, out] less half of the range.

    Version 1 has one less in each. It is subtracted from whole words, so that a 0 borrows from the next one; those of
    3 bits lie across words, and each is subtracted from by itself (GPTQModel 7.7).
    """
    words = np.ascontiguousarray(words).view(np.uint32)
    if first and bits != 3:
        words = words + np.uint32(sum(1 << place for place in range(0, _WORD, bits)))
    stored = fields(words, bits)[:, :out]
    return lowered((stored + 1) % 8 if first and bits == 3 else stored, bits)
