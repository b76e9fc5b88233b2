"""MXFP4 experts in the format of gpt-oss (OCP Microscaling Formats 1.0: 32 4-bit floats share a power of two).

A stack of weights X is ``X_blocks`` uint8 [experts, out, in / 32, 16], adjacent pairs with the first in the low nibble,
and ``X_scales`` uint8 [experts, out, in / 32], exponents with a bias of 127.
"""

from __future__ import annotations

from jaxinfer.quant.layouts import Codebook
from jaxinfer.weights.formats.fields import Fields
from jaxinfer.weights.formats.packing import nibbles
from jaxinfer.weights.formats.tensors import E2M1, POWERS, RawTensors
from jaxinfer.weights.quantized import StoredWeight

GROUP = 32
LAYOUT = Codebook(E2M1, GROUP, POWERS.name)
_END = "_blocks"


def weights(tensors: RawTensors, config: Fields) -> dict[str, StoredWeight]:
    """Return all weights of a checkpoint, by name.

    Raises:
        CheckpointError: tensors do not match the format.
    """
    del config
    return {name.removesuffix(_END): _weight(tensors, name.removesuffix(_END)) for name in tensors.ending(_END)}


def _weight(tensors: RawTensors, name: str) -> StoredWeight:
    codes, scales = f"{name}_blocks", f"{name}_scales"
    experts, out, groups, _ = tensors.take(codes, ("U8",), (None, None, None, GROUP // 2)).shape
    tensors.take(scales, ("U8",), (experts, out, groups))
    parts = {
        "codes": lambda: tensors.read(codes, nibbles).reshape(experts, out, groups * GROUP),
        "scales": lambda: tensors.scales(scales, lambda tensor: tensor.copy().view(POWERS)),
    }
    return tensors.stored((experts, out, groups * GROUP), LAYOUT, parts, (codes, scales))
