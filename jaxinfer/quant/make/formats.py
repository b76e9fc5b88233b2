"""Export of quantised weights: tensors of a Hugging Face folder in standard formats, and the quantisation config.

The layouts are those of jaxinfer/weights/formats, which reads them back.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxinfer.quant.make.codebooks import DYNAMIC
from jaxinfer.quant.make.grid import Made
from jaxinfer.quant.make.rtn import BLOCK, NESTED, MadeCodebook

Tensors = dict[str, np.ndarray]

_WORD = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output index, among eight, of each nibble, lowest nibble first
_FP8_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Stored:
    """Storage of all weights of a checkpoint being written.

    Attributes:
        format: a name in `FORMATS`.
        kind: "int", "float", "nf4", "fp4" or "mxfp4".
        bits: bits per code.
        group: inputs that share a scale; 0: all.
        symmetric: there are no zero points.
        act_order: inputs were processed in descending order of magnitude.
        ordered: inputs that share a scale need not be neighbours.
        blocks: scales are per block of 128 by 128.
        activations: inputs are also rounded to 8 bits, with a scale per token.
        nested: scales are rounded to 8 bits.
        dtype: dtype of the unquantized tensors of the model.
    """

    format: str
    kind: str
    bits: int
    group: int
    symmetric: bool = True
    act_order: bool = False
    ordered: bool = False
    blocks: bool = False
    activations: bool = False
    nested: bool = False
    dtype: str = "float32"


def packed(fields: np.ndarray, bits: int) -> np.ndarray:
    """Pack integers [rows, n] below 2^bits as int32 words [rows, ceil(n bits / 32)]: one little-endian bit stream."""
    rows, count = fields.shape
    stream = ((fields.astype(np.uint8)[..., None] >> np.arange(bits, dtype=np.uint8)) & 1).reshape(rows, count * bits)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % _WORD)))
    return np.packbits(stream, axis=1, bitorder="little").view("<i4")


def tensors_of(module: str, made: Made | MadeCodebook, stored: Stored) -> Tensors:
    """Return the tensors of the weight of ``module`` by name.

    Raises:
        ValueError: the format does not support the weight.
    """
    return FORMATS[stored.format].tensors(module, made, stored)


def config_of(
    stored: Stored, dense: Sequence[str], inside: Sequence[str], towers: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the ``quantization_config`` of config.json.

    Args:
        dense: linear modules that stay unquantized.
        inside: names, within a block, of the quantised modules.
        towers: components of the model of which nothing is quantised.
    """
    return FORMATS[stored.format].config(stored, dense, inside, towers)


def _unsigned(codes: Any, bits: int) -> np.ndarray:
    return (np.asarray(codes).astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)


def _file_groups(part: Any, layout_group: int, group: int) -> np.ndarray:
    """Return scales or zero points [out, groups of the file], the last of which may be a shorter group."""
    values = np.asarray(part)
    return values if not group or values.shape[1] == 1 else values[:, :: max(1, group // layout_group)]


def _plain_columns(made: Made) -> np.ndarray:
    """Return the codes in the order of the inputs."""
    codes = np.asarray(made.parts["codes"])
    if "order" not in made.parts:
        return codes
    plain = np.empty_like(codes)
    plain[:, np.asarray(made.parts["order"])] = codes
    return plain


# --------------------------------------------------------------------------------------------------------------
# compressed-tensors


def _compressed(module: str, made: Made | MadeCodebook, stored: Stored) -> Tensors:
    if isinstance(made, MadeCodebook):
        return _mxfp4(module, made)
    scales = np.asarray(made.parts["scales"])
    if stored.bits == 8:
        scales = scales[::_FP8_BLOCK] if stored.blocks else scales
        return {f"{module}.weight": np.asarray(made.parts["codes"]), f"{module}.weight_scale": scales}
    if "order" in made.parts:
        raise ValueError("compressed-tensors holds groups of neighbouring inputs: act-order needs static groups")
    codes = _unsigned(made.parts["codes"], stored.bits)
    tensors = {
        f"{module}.weight_packed": packed(codes, stored.bits),
        f"{module}.weight_scale": _file_groups(scales, made.layout.group, stored.group),
        f"{module}.weight_shape": np.asarray(codes.shape, np.int64),
    }
    if not stored.symmetric:
        zeros = _file_groups(_unsigned(made.parts["zeros"], stored.bits), made.layout.group, stored.group)
        tensors[f"{module}.weight_zero_point"] = np.ascontiguousarray(packed(zeros.T, stored.bits).T)
    return tensors


def _mxfp4(module: str, made: MadeCodebook) -> Tensors:
    codes = np.asarray(made.parts["codes"]).astype(np.uint8)
    scales = np.asarray(made.parts["scales"]).view(np.uint8)
    return {f"{module}.weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, f"{module}.weight_scale": scales}


def _compressed_config(
    stored: Stored, dense: Sequence[str], inside: Sequence[str], towers: Sequence[str]
) -> dict[str, Any]:
    del inside
    form = _compressed_form(stored)
    strategy = "group" if stored.group else "block" if stored.blocks else "channel"
    kind = "int" if stored.kind == "int" else "float"
    weights = {
        **_arguments(kind, stored.bits, strategy, dynamic=False),
        "group_size": stored.group or None,
        "symmetric": stored.symmetric,
        "block_structure": [_FP8_BLOCK, _FP8_BLOCK] if stored.blocks else None,
        "actorder": "static" if stored.act_order else None,
    }
    inputs = None
    if stored.activations:
        inputs = _arguments(kind, 8, "group" if stored.blocks else "token", dynamic=True)
        inputs["group_size"] = _FP8_BLOCK if stored.blocks else None
    group = {"format": form, "targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "ignore": ["lm_head", *dense, *(rf"re:.*{name}\..*" for name in towers)],
        "kv_cache_scheme": None,
    }


def _compressed_form(stored: Stored) -> str:
    if stored.kind == "mxfp4":
        return "mxfp4-pack-quantized"
    return f"{stored.kind}-quantized" if stored.bits == 8 else "pack-quantized"


def _arguments(kind: str, bits: int, strategy: str, dynamic: bool) -> dict[str, Any]:
    return {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True, "dynamic": dynamic}


# --------------------------------------------------------------------------------------------------------------
# GPTQ and AWQ


def _gptq(module: str, made: Made | MadeCodebook, stored: Stored) -> Tensors:
    assert isinstance(made, Made)
    codes, bits = _unsigned(_plain_columns(made), stored.bits), stored.bits
    out, inputs = codes.shape
    if inputs * bits % _WORD or out * bits % _WORD:
        raise ValueError(f"GPTQ packs whole words of 32 bits: {out} outputs and {inputs} inputs of {bits} bits are not")
    scales = _file_groups(made.parts["scales"], made.layout.group, stored.group)
    zeros = np.full(scales.shape, 1 << (bits - 1), np.uint8)
    if not stored.symmetric:
        zeros = _file_groups(_unsigned(made.parts["zeros"], bits), made.layout.group, stored.group)
    index = np.arange(inputs) // (stored.group or inputs)
    if "order" in made.parts:
        by_input = np.empty_like(index)
        by_input[np.asarray(made.parts["order"])] = index
        index = by_input
    return {
        f"{module}.qweight": np.ascontiguousarray(packed(codes, bits).T),
        f"{module}.qzeros": _less_one(np.ascontiguousarray(zeros.T), bits),
        f"{module}.scales": np.ascontiguousarray(scales.T),
        f"{module}.g_idx": index.astype(np.int32),
    }


def _less_one(zeros: np.ndarray, bits: int) -> np.ndarray:
    """Pack version 1 zero points, minus one: subtracted from whole words with borrow; of 3 bits, from each value."""
    if bits == 3:
        return packed((zeros + 7) % 8, bits)
    each = np.uint32(sum((1 << place) for place in range(0, _WORD, bits)))
    return (packed(zeros, bits).view(np.uint32) - each).view(np.int32)


def _gptq_config(stored: Stored, dense: Sequence[str], inside: Sequence[str], towers: Sequence[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": stored.bits,
        "group_size": stored.group or -1,
        "sym": stored.symmetric,
        "desc_act": stored.ordered,
        "pack_dtype": "int32",
        "lm_head": False,
    }
    config |= {"modules_in_block_to_quantize": [list(inside)]} if dense else {}
    return config | ({"dynamic": {rf"-:.*{name}\..*": {} for name in towers}} if towers else {})


def _awq(module: str, made: Made | MadeCodebook, stored: Stored) -> Tensors:
    assert isinstance(made, Made)
    codes = _unsigned(made.parts["codes"], stored.bits)
    if codes.shape[0] % len(_AWQ_ORDER):
        raise ValueError(f"AWQ packs eight outputs into a word: there are {codes.shape[0]}")
    zeros = _file_groups(_unsigned(made.parts["zeros"], stored.bits), made.layout.group, stored.group)
    scales = _file_groups(made.parts["scales"], made.layout.group, stored.group)
    return {
        f"{module}.qweight": _by_outputs(codes.T),
        f"{module}.qzeros": _by_outputs(zeros.T),
        f"{module}.scales": np.ascontiguousarray(scales.T),
    }


def _by_outputs(fields: np.ndarray) -> np.ndarray:
    turned = fields.reshape(fields.shape[0], -1, len(_AWQ_ORDER))[:, :, list(_AWQ_ORDER)]
    return packed(turned.reshape(fields.shape), 4)


def _awq_config(stored: Stored, dense: Sequence[str], inside: Sequence[str], towers: Sequence[str]) -> dict[str, Any]:
    del inside
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": stored.bits,
        "group_size": stored.group or -1,
        "zero_point": True,
        "modules_to_not_convert": ["lm_head", *dense, *towers],
    }


# --------------------------------------------------------------------------------------------------------------
# bitsandbytes


def _bitsandbytes(module: str, made: Made | MadeCodebook, stored: Stored) -> Tensors:
    assert isinstance(made, MadeCodebook)
    layout, name = made.layout, f"{module}.weight"
    codes = np.asarray(made.parts["codes"]).astype(np.uint8)
    flat = np.pad(codes.reshape(-1), (0, codes.size % 2))
    state: dict[str, Any] = {"quant_type": made.kind, "blocksize": BLOCK, "dtype": stored.dtype}
    state["shape"] = list(codes.shape)
    tensors = {
        name: (flat[::2] << 4 | flat[1::2])[:, None],
        f"{name}.absmax": _of_blocks(made.parts["scales"], codes.size, layout.group, BLOCK),
        f"{name}.quant_map": np.asarray(layout.table, np.float32),
    }
    if layout.nested:
        outer = _of_blocks(made.parts["nested_scales"], codes.size, layout.nested, BLOCK * NESTED)
        tensors |= {f"{name}.nested_absmax": outer, f"{name}.nested_quant_map": DYNAMIC}
        offset = float(np.asarray(made.parts["offset"])[0, 0])
        state |= {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": offset}
    text = json.dumps(state).encode()
    return {**tensors, f"{name}.quant_state.bitsandbytes__{made.kind}": np.frombuffer(text, np.uint8)}


def _of_blocks(part: Any, size: int, group: int, block: int) -> np.ndarray:
    """Return one value per block of the flattened weight, from values for ``group`` inputs of each row."""
    return np.asarray(part).reshape(-1)[np.arange(0, size, block) // group]


def _bitsandbytes_config(
    stored: Stored, dense: Sequence[str], inside: Sequence[str], towers: Sequence[str]
) -> dict[str, Any]:
    del inside
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": stored.kind,
        "bnb_4bit_use_double_quant": stored.nested,
        "bnb_4bit_compute_dtype": stored.dtype,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": ["lm_head", *dense, *towers],
    }


@dataclasses.dataclass(frozen=True)
class Format:
    """A format: functions that build its tensors and its ``quantization_config``."""

    tensors: Callable[[str, Made | MadeCodebook, Stored], Tensors]
    config: Callable[[Stored, Sequence[str], Sequence[str], Sequence[str]], dict[str, Any]]


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "awq": Format(_awq, _awq_config),
        "bitsandbytes": Format(_bitsandbytes, _bitsandbytes_config),
        "compressed-tensors": Format(_compressed, _compressed_config),
        "gptq": Format(_gptq, _gptq_config),
    }
)
