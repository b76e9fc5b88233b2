"""bitsandbytes checkpoints: LLM.int8() (https://arxiv.org/abs/2208.07339) and QLoRA (https://arxiv.org/abs/2305.14314).

8 bits: ``X`` int8 [out, in] and its ``SCB`` float32 [out]: weight = code * SCB / 127. 4 bits: ``X`` has the codes of
the flattened weight, first in the high nibble; ``X.quant_map`` their 16 values; ``X.absmax`` a scale for each block of
it, so blocks cross rows; and a JSON tensor the shape and block size. With double quantisation, scales are codes of
``X.nested_quant_map`` in their own blocks.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np

from jaxinfer.quant.layouts import Codebook, Grouped
from jaxinfer.weights.errors import quoted
from jaxinfer.weights.formats.fields import Fields
from jaxinfer.weights.formats.packing import nibbles
from jaxinfer.weights.formats.tensors import FLOATS, RawTensors, pieces
from jaxinfer.weights.quantized import StoredWeight

_KINDS = ("nf4", "fp4")
_STATE = ".quant_state.bitsandbytes__"
_LONGEST_STATE = 4096
_LARGEST_BLOCK = 1 << 20
_BYTES = ("U8", "I8", "F16", "BF16", "F32")  # dtypes of tensors that may hold the codes' bytes
_ROW_MAJOR = 0
_OF_127 = float(np.float32(1 / 127))  # as in bitsandbytes: a division would differ in the last bit


def weights(tensors: RawTensors, config: Fields) -> dict[str, StoredWeight]:
    """Return all weights of a checkpoint, by name.

    Raises:
        CheckpointError: the configuration is unknown, or tensors do not match it.
    """
    if config.flag("load_in_8bit", False):
        modules = tensors.modules(".SCB")
        outliers = config.number("llm_int8_threshold", 6.0)
        return {f"{module}.weight": _int8(tensors, module, outliers) for module in modules}
    if not config.flag("load_in_4bit", False):
        raise config.refused("load_in_4bit", ("true, or true for load_in_8bit",))
    config.choice("bnb_4bit_quant_type", _KINDS)
    states = {name: name[: name.rindex(_STATE)] for name in tensors.ending(*(f"{_STATE}{kind}" for kind in _KINDS))}
    return {weight: _four_bits(tensors, weight, state) for state, weight in states.items()}


def _int8(tensors: RawTensors, module: str, outliers: float) -> StoredWeight:
    codes, scales, form = f"{module}.weight", f"{module}.SCB", f"{module}.weight_format"
    out, inputs = tensors.take(codes, ("I8",), (None, None)).shape
    tensors.take(scales, ("F32",), (out,))
    if form in tensors:
        tensors.take_one(form, ("U8",))
        if (stored := int(tensors.one(form))) != _ROW_MAJOR:
            raise tensors.wrong(form, f"is {stored}: known is {_ROW_MAJOR}, row by row")
    parts = {
        "codes": lambda: tensors.read(codes),
        "scales": lambda: tensors.scales(scales).reshape(out, 1),
    }
    # inputs except outliers are rounded only on request: unrounded inputs are closer to the original model
    layout = Grouped("int8", inputs, factor=_OF_127, outliers=outliers)
    return tensors.stored((out, inputs), layout, parts, (codes, scales))


@dataclasses.dataclass(frozen=True)
class _State:
    """Quantisation state of a weight, from its JSON tensor."""

    shape: tuple[int, int]
    block: int
    nested: int  # blocks that share a nested scale; 0: scales are not nested
    offset: float

    @property
    def blocks(self) -> int:
        return pieces(math.prod(self.shape), self.block)


def _four_bits(tensors: RawTensors, weight: str, state: str) -> StoredWeight:
    quant_state = _state(tensors, state)
    out, inputs = quant_state.shape
    _take_codes(tensors, weight, math.prod(quant_state.shape))
    tensors.take(f"{weight}.absmax", ("U8",) if quant_state.nested else ("F32",), (quant_state.blocks,))
    group = math.gcd(inputs, quant_state.block)
    parts = {
        "codes": lambda: tensors.read(weight, lambda tensor: _codes(tensor, quant_state.shape)),
        "scales": lambda: tensors.scales(
            f"{weight}.absmax", lambda tensor: _by_rows(tensor, quant_state, group, quant_state.block)
        ),
    }
    table = _table(tensors, f"{weight}.quant_map", 16)
    if not quant_state.nested:
        layout = Codebook(table, group)
        return tensors.stored(quant_state.shape, layout, parts, (weight, f"{weight}.absmax"))
    nested, outer = f"{weight}.nested_absmax", quant_state.block * quant_state.nested
    tensors.take(nested, ("F32",), (pieces(quant_state.blocks, quant_state.nested),))
    step = math.gcd(inputs, outer)
    parts["nested_scales"] = lambda: tensors.scales(nested, lambda tensor: _by_rows(tensor, quant_state, step, outer))
    parts["offset"] = lambda: np.full((out, 1), quant_state.offset, np.float32)
    scale_table = _table(tensors, f"{weight}.nested_quant_map", 256)
    layout = Codebook(table, group, "uint8", nested=step, scale_table=scale_table)
    return tensors.stored(quant_state.shape, layout, parts, (weight, f"{weight}.absmax", nested))


def _take_codes(tensors: RawTensors, weight: str, values: int) -> None:
    info = tensors.take(weight, _BYTES, (None, 1))
    if info.nbytes != pieces(values, 2):
        raise tensors.wrong(weight, f"has {info.nbytes} bytes where {values} codes of 4 bits take {pieces(values, 2)}")


def _codes(stored: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    flat = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
    return nibbles(flat, high_first=True)[: math.prod(shape)].reshape(shape)


def _by_rows(scales: np.ndarray, state: _State, group: int, block: int) -> np.ndarray:
    """Expand a scale for each block of the flattened weight to one for each ``group`` inputs of a row."""
    starts = np.arange(0, math.prod(state.shape), group)
    return scales[starts // block].reshape(state.shape[0], -1)


def _table(tensors: RawTensors, name: str, entries: int) -> tuple[float, ...]:
    tensors.take(name, FLOATS, (entries,))
    return tuple(tensors.scales(name).astype(np.float32).tolist())


def _state(tensors: RawTensors, name: str) -> _State:
    (size,) = tensors.take(name, ("U8",), (None,)).shape
    if size > _LONGEST_STATE:
        raise tensors.wrong(name, f"is {size} bytes long, more than {_LONGEST_STATE}")
    values = _json(tensors, name)
    match values.get("shape"):
        case [int(out), int(inputs)] if out > 0 and inputs > 0:
            shape = (out, inputs)
        case other:
            raise tensors.wrong(name, f"gives the shape {quoted(str(other))}, not [out, in]")
    block = _extent(tensors, name, values, "blocksize")
    if "nested_offset" not in values:
        return _State(shape, block, 0, 0.0)
    return _State(shape, block, _extent(tensors, name, values, "nested_blocksize"), _offset(tensors, name, values))


def _json(tensors: RawTensors, name: str) -> dict[str, Any]:
    try:
        values = json.loads(tensors.read(name).tobytes().decode("utf-8"))
    except (ValueError, RecursionError):
        raise tensors.wrong(name, "is not valid JSON") from None
    if not isinstance(values, dict):
        raise tensors.wrong(name, "is not a JSON object")
    return values


def _extent(tensors: RawTensors, name: str, values: dict[str, Any], field: str) -> int:
    value = values.get(field)
    if type(value) is not int or not 1 <= value <= _LARGEST_BLOCK:
        raise tensors.wrong(name, f"has {field} {quoted(str(value))}, not 1 to {_LARGEST_BLOCK}")
    return value


def _offset(tensors: RawTensors, name: str, values: dict[str, Any]) -> float:
    value = values["nested_offset"]
    if type(value) not in (int, float) or not abs(value) <= float(np.finfo(np.float32).max):
        raise tensors.wrong(name, f"has nested_offset {quoted(str(value))}, not a float32 number")
    return float(value)
