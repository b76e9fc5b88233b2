"""GPTQ checkpoints of AutoGPTQ, GPTQModel and auto-round, versions 1 and 2 (https://arxiv.org/abs/2210.17323).

A weight X is ``X.qweight`` int32 [in * bits / 32, out], packed along the inputs; ``X.qzeros`` int32
[groups, out * bits / 32], packed along the outputs; ``X.scales`` [groups, out]; and ``X.g_idx`` int32 [in]:
weight[i, o] = scales[g, o] * (code[i, o] - zero[g, o]) with g = g_idx[i].

Version 1 stores zero - 1. Where ``sym`` is true each zero is half of the range, so what is stored shows the version,
whatever the configuration calls it; elsewhere nothing but ``checkpoint_format`` does.
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
    """Storage of a module.

    Attributes:
        size: inputs that share a scale; 0: all; None: what the scales are of.
        first: zero points are those of version 1.
        ordered: groups are not of neighbours, so that nothing but an index says which they are.
    """

    bits: int
    size: int | None
    symmetric: bool
    first: bool
    ordered: bool = False


def weights(tensors: RawTensors, config: Fields) -> dict[str, StoredWeight]:
    """All weights of a checkpoint, by name.

    Raises:
        CheckpointError: the configuration is not a known one, or tensors do not fit it.
    """
    first = config.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq"
    if config.flag("is_marlin_format", False):
        raise config.refused("is_marlin_format", ("false",))
    bits = config.choice("bits", _BITS)
    whole = Scheme(bits, config.groups(), config.flag("sym", False), first, config.flag("desc_act", False))
    return modules(tensors, config, whole, _BITS)


def modules(tensors: RawTensors, config: Fields, whole: Scheme, known: tuple[int, ...]) -> dict[str, StoredWeight]:
    """All weights of a checkpoint, by name.

    Args:
        whole: the scheme of modules of which the configuration says nothing of their own.
        known: numbers of bits that there may be.

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

    names = [name.removesuffix(_END) for name in tensors.ending(_END)]
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
    """Sees that zero points are all half of the range, in one version or the other."""
    half = 1 << (bits - 1)
    stored = tensors.read(zeros, lambda tensor: fields(tensor, bits)[:, :out])
    if not any((stored == value).all() for value in (half - 1, half)):
        raise tensors.wrong(
            zeros,
            f"holds zero points other than {half}, stored as {half - 1} or {half}, although its configuration says "
            f"that sym is true: set it to false if the weight is not symmetric",
        )


def _zeros(words: np.ndarray, bits: int, out: int, first: bool) -> np.ndarray:
    """Zero points [groups, out] less half of the range.

    Version 1 has one less in each. It is subtracted from whole words, so that a 0 borrows from the next one; those of
    bits that do not divide a word lie across words, and each is subtracted from by itself (GPTQModel 7.7).
    """
    words = np.ascontiguousarray(words).view(np.uint32)
    divides = _WORD % bits == 0
    if first and divides:
        words = words + np.uint32(sum(1 << place for place in range(0, _WORD, bits)))
    stored = fields(words, bits)[:, :out]
    return lowered((stored + 1) % (1 << bits) if first and not divides else stored, bits)
