"""Checkpoints of auto-round (https://github.com/intel/auto-round): weights packed as in GPTQ or AWQ.

The field ``packing_format`` selects the packing; its spelling varies by release: "auto_round:auto_gptq",
"auto_round:auto_awq", "auto_round:gptq:exllamav2", "auto_round". Values that name neither, and "auto_round:gptqmodel",
mean GPTQ version 2, with unmodified zero points. The first releases use the field ``backend`` instead.
"""

from __future__ import annotations

from jaxinfer.weights.formats import awq, gptq
from jaxinfer.weights.formats.fields import Fields
from jaxinfer.weights.formats.overrides import require_integers
from jaxinfer.weights.formats.tensors import RawTensors
from jaxinfer.weights.quantized import StoredWeight

_OURS = "auto_round"
_AWQ = ("auto_awq", "awq")
_GPTQ = ("auto_gptq", "gptq", "auto")
_AS_THEY_ARE = ("", "gptqmodel")
# Optional suffix: the library that a release was to run the file with. It does not affect the file's contents.
_LIBRARIES = ("", "exllamav2", "triton", "tritonv2", "torch", "qbits", "ipex", "hpu")
_BITS = (2, 3, 4, 5, 6, 7, 8)


def weights(tensors: RawTensors, config: Fields) -> dict[str, StoredWeight]:
    """Return all weights of a checkpoint, by name.

    Raises:
        CheckpointError: the configuration is unknown, or tensors do not match it.
    """
    require_integers(config)
    config.require_empty("rotation_config", "spinquant_config", "super_bits", "super_group_size")
    kind = _packing(config)
    if kind in _AWQ:
        return awq.weights(tensors, config)
    bits, symmetric = config.choice("bits", _BITS, 4), config.flag("sym", True)
    whole = gptq.Scheme(bits, config.groups(), symmetric, first=kind in _GPTQ)
    return gptq.modules(tensors, config, whole, _BITS)


def _packing(config: Fields) -> str:
    """Return the packing's name without prefix and library suffix."""
    backend = config.get("backend")
    old = config.get("packing_format") is None and isinstance(backend, str) and backend.startswith(_OURS)
    field = "backend" if old else "packing_format"
    words = str(config.get(field) or _GPTQ[0]).lower().removeprefix(_OURS).removeprefix(":").split(":")
    kind, *libraries = ["", *words] if words[0] in _LIBRARIES else words
    if kind not in (*_GPTQ, *_AWQ, *_AS_THEY_ARE) or len(libraries) > 1 or not {*libraries} <= {*_LIBRARIES}:
        raise config.refused(field, [f"{_OURS}:{one}".rstrip(":") for one in (*_GPTQ[:1], *_AWQ[:1], *_AS_THEY_ARE)])
    return kind
