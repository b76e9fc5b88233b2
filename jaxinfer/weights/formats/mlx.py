"""Folders of MLX (https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html).

A weight X is ``X.weight`` uint32 [..., out, in * bits / 32], each row one bit stream, lowest bits first, with
``X.scales`` [..., out, in / group], and depending on the mode

- affine: ``X.biases`` like the scales: weight = code * scale + bias, with 2, 3, 4, 5, 6 or 8 bits;
- mxfp4, mxfp8: E2M1 or E4M3 times a power of two, whose exponent is ``X.scales`` uint8;
- nvfp4: E2M1 times an E4M3, whose bits are ``X.scales`` uint8.

Embeddings and heads are stored like other weights; experts are one tensor [experts, out, in]. The field
``quantization`` of config.json has the default mode, bits and group, and overrides by module name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.quant.ggml import E2M1_VALUES
from jaxinfer.quant.layouts import Codebook, Grouped, Layout
from jaxinfer.weights.formats.fields import Fields
from jaxinfer.weights.formats.fp8 import FP8
from jaxinfer.weights.formats.packing import by_rows, nibbles, signed
from jaxinfer.weights.formats.tensors import FLOATS, POWERS, RawTensors, dtype_name
from jaxinfer.weights.quantized import StoredWeight
from jaxinfer.weights.safetensors.reader import DTYPES

METHOD = "mlx"
FIELD = "quantization"
_END = ".scales"
_WORD = 32


class _Mode(NamedTuple):
    """Supported bit widths and group sizes; the first of each is the default."""

    bits: tuple[int, ...]
    groups: tuple[int, ...]


_MODES: Mapping[str, _Mode] = MappingProxyType(
    {
        "affine": _Mode((4, 2, 3, 5, 6, 8), (64, 32, 128)),
        "mxfp4": _Mode((4,), (32,)),
        "mxfp8": _Mode((8,), (32,)),
        "nvfp4": _Mode((4,), (16,)),
    }
)
# Layout of modes without biases, and the dtype of the scales' bytes.
_FLOATS: Mapping[str, tuple[Layout, np.dtype[Any]]] = MappingProxyType(
    {
        "mxfp4": (Codebook(E2M1_VALUES, 32, POWERS.name), POWERS),
        "mxfp8": (Grouped(FP8, 32, POWERS.name), POWERS),
        "nvfp4": (Codebook(E2M1_VALUES, 16, FP8), DTYPES["F8_E4M3"]),
    }
)


class _Scheme(NamedTuple):
    mode: str
    bits: int
    group: int


def described(config_json: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json with an MLX ``quantization`` field rewritten as ``quantization_config``."""
    found = config_json.get(FIELD)
    if not isinstance(found, dict) or not {"bits", "group_size"} <= found.keys():
        return config_json
    others = {name: value for name, value in config_json.items() if name != FIELD}
    return {**others, "quantization_config": {**found, "quant_method": METHOD}}


def weights(tensors: RawTensors, config: Fields) -> dict[str, StoredWeight]:
    """Return all weights of a checkpoint, by name.

    Raises:
        CheckpointError: the configuration is unknown, or tensors do not match it.
    """
    config = Fields(config.values, FIELD)
    whole = _scheme(config)
    modules = tensors.modules(_END)
    return {f"{module}.weight": _weight(tensors, module, _scheme_of(config, module, whole)) for module in modules}


def _scheme_of(config: Fields, module: str, whole: _Scheme) -> _Scheme:
    """Return the scheme of a module; a field missing from its override takes the mode's default."""
    own = config.values.get(module)
    if own is None or own is True:
        return whole
    return _scheme(config.child(module))


def _scheme(config: Fields) -> _Scheme:
    mode = config.choice("mode", tuple(_MODES), "affine")
    known = _MODES[mode]
    bits = config.choice("bits", known.bits, known.bits[0])
    return _Scheme(mode, bits, config.choice("group_size", known.groups, known.groups[0]))


def _weight(tensors: RawTensors, module: str, scheme: _Scheme) -> StoredWeight:
    codes = f"{module}.weight"
    form = tensors.shape(codes)
    *outs, words = tensors.take(codes, ("U32",), (None,) * max(len(form), 2)).shape
    inputs = words * _WORD // scheme.bits
    if words * _WORD % scheme.bits or inputs % scheme.group:
        raise tensors.wrong(
            codes, f"has {words} words a row, which are no groups of {scheme.group} fields of {scheme.bits} bits"
        )
    if len(outs) > 1 and f"{module}.bias" in tensors:
        raise tensors.wrong(codes, "holds experts with biases, which are not read: take the original model")
    make = _affine if scheme.mode == "affine" else _floats
    return make(tensors, module, scheme, (*outs, inputs))


def _affine(tensors: RawTensors, module: str, scheme: _Scheme, shape: tuple[int, ...]) -> StoredWeight:
    codes, scales, biases = (f"{module}.{part}" for part in ("weight", "scales", "biases"))
    groups = (*shape[:-1], shape[-1] // scheme.group)
    info = tensors.take(scales, FLOATS, groups)
    tensors.take(biases, (info.dtype,), groups)
    parts: dict[str, Callable[[], np.ndarray]] = {
        "codes": lambda: signed(tensors.read(codes, lambda words: _unpacked(words, scheme.bits, shape)), scheme.bits),
        "scales": lambda: tensors.scales(scales),
        "biases": lambda: tensors.scales(biases),
    }
    kind, moved = ("int4" if scheme.bits <= 4 else "int8"), 1 << (scheme.bits - 1)
    layout = Grouped(kind, scheme.group, dtype_name(info), biased=moved)
    return tensors.stored(shape, layout, parts, (codes, scales, biases))


def _unpacked(words: np.ndarray, bits: int, shape: tuple[int, ...]) -> np.ndarray:
    return by_rows(words.reshape(-1, words.shape[-1]), bits, shape[-1]).reshape(shape)


def _floats(tensors: RawTensors, module: str, scheme: _Scheme, shape: tuple[int, ...]) -> StoredWeight:
    codes, scales = f"{module}.weight", f"{module}.scales"
    tensors.take(scales, ("U8",), (*shape[:-1], shape[-1] // scheme.group))
    layout, kind = _FLOATS[scheme.mode]

    def read_codes(words: np.ndarray) -> np.ndarray:
        stored = np.ascontiguousarray(words).view(np.uint8)
        return nibbles(stored) if scheme.bits == 4 else np.array(stored).view(DTYPES["F8_E4M3"])

    parts: dict[str, Callable[[], np.ndarray]] = {
        "codes": lambda: tensors.read(codes, read_codes),
        "scales": lambda: tensors.scales(scales, lambda tensor: tensor.copy().view(kind)),
    }
    return tensors.stored(shape, layout, parts, (codes, scales))
