"""GPTQ checkpoints of AutoGPTQ, GPTQModel and auto-round, versions 1 and 2 (https://arxiv.org/abs/2210.17323).

A weight X is ``X.qweight`` int32 [in * bits / 32, out], packed along the inputs; ``X.qzeros`` int32 [groups, out * bits
/ 32], packed along the outputs; ``X.scales`` [groups, out]; and ``X.g_idx`` int32 [in]: weight[i, o] = scales[g, o] *
(code[i, o] - zero[g, o]) with g = g_idx[i].

Version 1 stores zero - 1. If ``sym`` is true, every zero point is half of the range, so the stored values show the
version regardless of the configuration; otherwise only ``checkpoint_format`` gives it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxinfer.quant.layouts import Grouped
from jaxinfer.weights.formats.columns import columns_of, size_of
from jaxinfer.weights.formats.fields import Fields
from jaxinfer.weights.formats.overrides import Overrides, require_integers
from jaxinfer.weights.formats.packing import by_rows, fields, lowered, signed, transposed
from jaxinfer.weights.formats.tensors import FLOATS, RawTensors, dtype_name, pieces
from jaxinfer.weights.quantized import StoredWeight

_BITS = (2, 3, 4, 8)
_END = ".qweight"
_WORD = 32


class Scheme(NamedTuple):
    """Quantisation scheme of a module.

    Attributes:
        size: inputs that share a scale; 0: all; None: implied by the shape of the scales.
        first: zero points are stored as in version 1.
        ordered: act-order: groups are not contiguous and need an index.
    """

    bits: int
    size: int | None
    symmetric: bool
    first: bool
    ordered: bool = False


def weights(tensors: RawTensors, config: Fields) -> dict[str, StoredWeight]:
    """Return all weights of a checkpoint, by name.

    Raises:
        CheckpointError: the configuration is unknown, or tensors do not match it.
    """
    first = config.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq"
    if config.flag("is_marlin_format", False):
        raise config.refused("is_marlin_format", ("false",))
    bits = config.choice("bits", _BITS)
    whole = Scheme(bits, config.groups(), config.flag("sym", False), first, config.flag("desc_act", False))
    return modules(tensors, config, whole, _BITS)


def modules(tensors: RawTensors, config: Fields, whole: Scheme, known: tuple[int, ...]) -> dict[str, StoredWeight]:
    """Return all weights of a checkpoint, by name.

    Args:
        whole: the scheme of modules that the configuration does not override.
        known: allowed bit widths.

    Raises:
        CheckpointError: see `weights`.
    """
    overrides = Overrides(tensors, config)
    require_integers(config)

    def scheme(module: str) -> Scheme:
        own = overrides.of(module)
        if own is None:
            return whole
        bits, symmetric = own.choice("bits", known, whole.bits), own.flag("sym", whole.symmetric)
        return Scheme(bits, own.groups(whole.size), symmetric, whole.first, own.flag("desc_act", whole.ordered))

    names = tensors.modules(_END)
    return {f"{name}.weight": _weight(tensors, name, scheme(name)) for name in names}


def _weight(tensors: RawTensors, module: str, scheme: Scheme) -> StoredWeight:
    codes, zeros, scales, index = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    bits = scheme.bits
    words, out = tensors.take(codes, ("I32",), (None, None)).shape
    if words * _WORD % bits:
        raise tensors.wrong(codes, f"has {words} rows, which do not hold whole fields of {bits} bits")
    inputs = words * _WORD // bits
    size = size_of(tensors, scales, inputs, scheme.size)
    groups = pieces(inputs, size or inputs)
    info = tensors.take(scales, FLOATS, (groups, out))
    tensors.take(zeros, ("I32",), (groups, pieces(out * bits, _WORD)))
    indexed = index in tensors or (scheme.ordered and groups > 1)
    columns = columns_of(tensors, inputs, size, index if indexed else None)
    layout = Grouped(
        codes="int8" if bits > 4 else "int4",
        group=columns.group,
        scales=dtype_name(info),
        zeros=not scheme.symmetric,
        ordered=columns.order is not None,
    )

    def read_zeros() -> np.ndarray:
        stored = tensors.read(zeros, lambda tensor: _zeros(tensor, bits, out, scheme.first))
        return columns.scales(np.ascontiguousarray(stored.T))

    def read_scales() -> np.ndarray:
        if scheme.symmetric:
            _require_half(tensors, zeros, bits, out)
        return columns.scales(tensors.scales(scales, transposed))

    parts = {
        "codes": lambda: signed(tensors.read(codes, lambda t: by_rows(t.T, bits, inputs, columns.order)), bits),
        "scales": read_scales,
        "zeros": read_zeros,
        "order": lambda: np.array(columns.order),
    }
    return tensors.stored((out, inputs), layout, parts, (codes, zeros, scales))


def _require_half(tensors: RawTensors, zeros: str, bits: int, out: int) -> None:
    """Check that all zero points are half of the range, in either version."""
    half = 1 << (bits - 1)
    stored = tensors.read(zeros, lambda tensor: fields(tensor, bits)[:, :out])
    if not any((stored == value).all() for value in (half - 1, half)):
        raise tensors.wrong(
            zeros,
            f"holds zero points other than {half}, stored as {half - 1} or {half}, although its configuration says "
            f"that sym is true: set it to false if the weight is not symmetric",
        )


def _zeros(words: np.ndarray, bits: int, out: int, first: bool) -> np.ndarray:
    """Return the zero points [groups, out] minus half of the range.

    Version 1 stores each minus one. Its writer subtracts from whole words, so a 0 borrows from the next field; fields
    whose bits do not divide a word can straddle two words, and each field is decremented separately (GPTQModel 7.7).
    """
    words = np.ascontiguousarray(words).view(np.uint32)
    divides = _WORD % bits == 0
    if first and divides:
        words = words + np.uint32(sum(1 << place for place in range(0, _WORD, bits)))
    stored = fields(words, bits)[:, :out]
    return lowered((stored + 1) % (1 << bits) if first and not divides else stored, bits)
