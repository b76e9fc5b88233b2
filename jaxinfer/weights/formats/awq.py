"""AWQ checkpoints of AutoAWQ, GPTQModel and auto-round, version "gemm" (Lin et al. 2023, https://arxiv.org/abs/2306.00978).

A weight X is ``X.qweight`` int32 [in, out / 8] and ``X.qzeros`` int32 [groups, out / 8], both packed along the outputs,
and ``X.scales`` [groups, out]: weight[i, o] = scales[g, o] * (code[i, o] - zero[g, o]).
"""

from __future__ import annotations

import numpy as np

from jaxinfer.quant.layouts import Grouped
from jaxinfer.weights.formats.columns import columns_of, size_of
from jaxinfer.weights.formats.fields import Fields
from jaxinfer.weights.formats.overrides import Overrides
from jaxinfer.weights.formats.packing import lowered, signed, transposed
from jaxinfer.weights.formats.tensors import FLOATS, RawTensors, dtype_name, pieces
from jaxinfer.weights.quantized import StoredWeight

_END = ".qweight"
_BITS = 4
_PACK = 8
_OTHER = "llm-awq"  # uses a different packing
_OUTPUT = (0, 2, 4, 6, 1, 3, 5, 7)  # output index, among the eight of a word, of each nibble, lowest nibble first


def weights(tensors: RawTensors, config: Fields) -> dict[str, StoredWeight]:
    """Return all weights of a checkpoint, by name.

    Raises:
        CheckpointError: the configuration is unknown, or tensors do not match it.
    """
    config.choice("version", ("gemm",), "gemm")
    if str(config.get("backend")).lower() == _OTHER:
        raise config.refused("backend", ("autoawq", "others that read its files"))
    config.choice("bits", (_BITS,), _BITS)
    config.flag("zero_point", True)  # if false, every zero point is stored as half of the range
    overrides, size = Overrides(tensors, config), config.groups()

    def group_size(module: str) -> int | None:
        own = overrides.of(module)
        if own is None:
            return size
        own.choice("bits", (_BITS,), _BITS)
        return own.groups(size)

    modules = tensors.modules(_END)
    return {f"{module}.weight": _weight(tensors, module, group_size(module)) for module in modules}


def _weight(tensors: RawTensors, module: str, size: int | None) -> StoredWeight:
    codes, zeros, scales = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    inputs, words = tensors.take(codes, ("I32",), (None, None)).shape
    size = size_of(tensors, scales, inputs, size)
    out, groups = words * _PACK, pieces(inputs, size or inputs)
    tensors.take(zeros, ("I32",), (groups, words))
    info = tensors.take(scales, FLOATS, (groups, out))
    columns = columns_of(tensors, inputs, size)
    parts = {
        "codes": lambda: signed(tensors.read(codes, _by_outputs), _BITS),
        "scales": lambda: columns.scales(tensors.scales(scales, transposed)),
        "zeros": lambda: columns.scales(lowered(tensors.read(zeros, _by_outputs), _BITS)),
    }
    layout = Grouped("int4", columns.group, dtype_name(info), zeros=True)
    return tensors.stored((out, inputs), layout, parts, (codes, zeros, scales))


def _by_outputs(words: np.ndarray) -> np.ndarray:
    """Unpack the nibbles of ``[rows, out / 8]`` as uint8 ``[out, rows]``."""
    turned = transposed(words).view(np.uint32)
    result = np.empty((turned.shape[0], _PACK, turned.shape[1]), np.uint8)
    for nibble, output in enumerate(_OUTPUT):
        np.right_shift(turned, _BITS * nibble, out=result[:, output], casting="unsafe")
    np.bitwise_and(result, 0x0F, out=result)
    return result.reshape(-1, turned.shape[1])
