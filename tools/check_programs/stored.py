"""An abstract model with quantised layer weights, without weight data: the programs that `--weights` compiles."""

from __future__ import annotations

from typing import NoReturn

from jaxinfer.models.model import Model
from jaxinfer.quant.layouts import Codebook, Grouped, Layout
from jaxinfer.types import ParamSpec, ParamTree, walk_specs
from jaxinfer.weights.formats import mxfp4
from jaxinfer.weights.quantized import StoredWeight, is_upright, storages

WEIGHTS = ("int8", "int8-activations", "int4", "fp8", "fp8-activations", "nf4", "mxfp4")
_TABLE = tuple(float(value) for value in range(-8, 8))
_BEFORE_AND_BEHIND = ("embed", "head")


def layout_of(kind: str, inputs: int) -> Layout:
    """Return the layout of one of `WEIGHTS` for a weight with ``inputs`` inputs."""
    match kind:
        case "int8":
            return Grouped("int8", inputs, scales="bfloat16")
        case "int8-activations":
            return Grouped("int8", inputs, scales="bfloat16", activations="int8")
        case "int4":
            return Grouped("int4", 128, scales="bfloat16")
        case "fp8":
            return Grouped("float8_e4m3fn", inputs)
        case "fp8-activations":
            return Grouped("float8_e4m3fn", inputs, activations="float8_e4m3fn")
        case "mxfp4":
            return mxfp4.LAYOUT
        case _:
            return Codebook(_TABLE, 64)


def dequantized(kind: str) -> bool:
    """Return whether programs dequantize chunks of outputs in turn, because no kernel multiplies by the storage."""
    return kind == "nf4"


def stored(model: Model, kind: str) -> Model:
    """Return ``model`` with every matrix of its layers (mxfp4: experts only) quantised, as abstract parameters."""
    dtype = str(model.dtype)
    return model.with_specs(storages(model.specs, _weights(model.specs, kind), dtype), dtype)


def _weights(specs: ParamTree, kind: str) -> dict[str, StoredWeight]:
    found = {}
    for path, spec in walk_specs(specs):
        published = kind != "mxfp4" or "expert" in spec.axes  # gpt-oss checkpoints store only their experts in MXFP4
        if spec.inputs is not None and path[0] not in _BEFORE_AND_BEHIND and published:
            for shape, name in _sources(spec):
                found[name] = StoredWeight(shape, layout_of(kind, shape[-1]), _nothing, 0)
    return found


def _sources(spec: ParamSpec) -> list[tuple[tuple[int, ...], str]]:
    """Return each tensor as ``[*stack, out, in]``."""
    found = []
    for source in spec.sources:
        *stack, rows, columns = source.shape
        ends = (rows, columns) if is_upright(spec, source) else (columns, rows)
        found.append(((*stack, *ends), source.name))
    return found


def _nothing(part: str) -> NoReturn:
    raise AssertionError(f"there is no {part} to be read")
