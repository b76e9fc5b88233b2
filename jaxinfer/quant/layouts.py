"""Storage layouts of a weight ``[*out, in]`` that is not a float array: the arrays and their meaning.

A layout is static: it is a part of a compiled program. It has two kinds of arrays. *Parts* begin with the weight's
``out`` dimensions, so that they are sharded, stacked and sliced like the weight; *input parts* are shared by all
outputs. `Quantized` (storage.py) holds the arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.quant import ggml
from pallas_kernels import quant_matmul

Parts = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Part:
    """An array of a stored weight: ``[*out, *shape]``, or ``shape`` for an input part.

    Attributes:
        shape: its own dimensions. If there are several, the first runs along the inputs.
        dtype: a dtype name of numpy or ml_dtypes.
        along: ``shape[0]`` runs along the inputs and is sharded with them. False: every shard needs the whole array.
        first: ``shape`` comes before the outputs, ``[*shape, *out]``.
    """

    shape: tuple[int, ...]
    dtype: str
    along: bool = True
    first: bool = False


@runtime_checkable
class Layout(Protocol):
    """Protocol of a storage layout with its parameters: hashable, and equal if weights can be stacked into one."""

    def parts(self, inputs: int) -> dict[str, Part]:
        """Return the arrays of a weight with this number of inputs, by name; raise ValueError if they do not fit."""
        ...

    def input_parts(self, inputs: int) -> dict[str, Part]:
        """Return the arrays that all outputs share."""
        ...

    def dequantize(self, parts: Parts) -> Float[Array, "*out k"]:
        """Return the weight in float32, bitwise identical (outside of jit) to the tool that made it.

        Columns stay in stored order: the caller applies ``order``, if there is such an input part.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Integers or floats with group scales: weight = (codes - zeros) * scales * factor, a scale per ``group`` inputs.

    Parts: ``codes`` [*out, in]; ``scales`` [*out, in / group]; with ``zeros`` also ``zeros`` int8 [*out, in / group];
    with ``biased`` ``biases`` [*out, in / group] of the scales' dtype: weight = (codes + biased) * scales + biases.
    Input parts: with ``ordered``, ``order`` int32 [in]: input index of each stored column; columns of a group are
    adjacent, whatever their inputs (act-order, Frantar et al. 2022). With ``static``, ``input_scale`` float32 [].

    Attributes:
        codes: "int4" (-8 to 7), "int8" or "float8_e4m3fn". Unsigned codes are shifted down by half the range.
        group: inputs that share a scale; all inputs: one scale per channel.
        scales: dtype of the scales.
        zeros: there are zero points.
        biased: shift that was subtracted from codes of groups with a bias, MLX's kind of zero point; 0: no biases.
        factor: factor of the whole weight.
        ordered: columns are not in the order of the inputs.
        activations: dtype that inputs are rounded to before the product: "" (none), "int8" or "float8_e4m3fn", with a
            scale for each token and ``activation_group`` inputs (0: all).
        activation_bound: upper bound of the magnitude that sets the scale of inputs; larger inputs are clipped; 0:
            none.
        static: inputs have one scale from the checkpoint instead.
        groups_first: scales and zeros are [in / group, *out], as GPU kernels read them.
        int8_steps: code of a token's largest input in "int8". With 127.5, as in compressed-tensors, the last bit of a
            value decides between -127 and -128; 127 is insensitive to it.
        outliers: inputs of at least this magnitude have a separate unrounded product (LLM.int8(), Dettmers et al. 2022,
            here per token); 0: none.
    """

    codes: str
    group: int
    scales: str = "float32"
    zeros: bool = False
    biased: int = 0
    factor: float = 1.0
    ordered: bool = False
    activations: str = ""
    activation_group: int = 0
    activation_bound: float = 0.0
    static: bool = False
    int8_steps: float = 127.5
    outliers: float = 0.0
    groups_first: bool = False

    def parts(self, inputs: int) -> dict[str, Part]:
        groups = _groups(inputs, self.group)
        kind = Part((groups,), self.scales, groups > 1, self.groups_first)
        parts = {"codes": Part((inputs,), self.codes), "scales": kind}
        if self.zeros:
            parts["zeros"] = dataclasses.replace(kind, dtype="int8")
        if self.biased:
            parts["biases"] = kind
        return parts

    def input_parts(self, inputs: int) -> dict[str, Part]:
        parts = {"order": Part((inputs,), "int32", along=False)} if self.ordered else {}
        return {**parts, "input_scale": Part((), "float32")} if self.static else parts

    def dequantize(self, parts: Parts) -> Float[Array, "*out k"]:
        codes, own = parts["codes"].astype(jnp.float32), dict(parts)
        if self.groups_first:
            own = {name: part if name == "codes" else jnp.moveaxis(part, 0, -1) for name, part in parts.items()}
        if self.zeros:
            codes = codes - _repeated(own["zeros"].astype(jnp.float32), codes)
        if self.biased:
            codes = codes + self.biased
        weight = codes * _repeated(own["scales"].astype(jnp.float32), codes)
        if self.biased:
            weight = weight + _repeated(own["biases"].astype(jnp.float32), codes)
        return weight if self.factor == 1.0 else weight * jnp.float32(self.factor)


@dataclasses.dataclass(frozen=True)
class Codebook:
    """Codebook weights: weight = table[codes] * scale, with a scale for each ``group`` neighbours along the inputs.

    Parts: ``codes`` uint4 [*out, in], ``scales`` [*out, in / group]. With ``divided`` also ``divisor`` float32 [*out,
    1]: scales are divided by it first (NVFP4). With ``nested`` scales are themselves codes (double quantisation,
    Dettmers et al. 2023): scale = scale_table[scales] * nested_scales + offset, with ``nested_scales`` float32 [*out,
    in / nested] and ``offset`` float32 [*out, 1].

    Attributes:
        table: 16 values.
        group: inputs that share a scale.
        scales: dtype of the scales; "float8_e8m0fnu" are powers of two (MXFP4), "uint8" codes of ``scale_table``.
        divided: scales are divided by ``divisor``.
        nested: inputs that share a nested scale; 0: scales are not nested.
        scale_table: 256 values.
    """

    table: tuple[float, ...]
    group: int
    scales: str = "float32"
    divided: bool = False
    nested: int = 0
    scale_table: tuple[float, ...] = ()

    def parts(self, inputs: int) -> dict[str, Part]:
        groups = _groups(inputs, self.group)
        parts = {"codes": Part((inputs,), "uint4"), "scales": Part((groups,), self.scales, groups > 1)}
        if self.divided:
            parts["divisor"] = Part((1,), "float32", along=False)
        if self.nested:
            outer = _groups(inputs, self.nested)
            parts["nested_scales"] = Part((outer,), "float32", outer > 1)
            parts["offset"] = Part((1,), "float32", along=False)
        return parts

    def input_parts(self, inputs: int) -> dict[str, Part]:
        del inputs
        return {}

    def dequantize(self, parts: Parts) -> Float[Array, "*out k"]:
        values = jnp.take(jnp.asarray(self.table, jnp.float32), parts["codes"].astype(jnp.int32), mode="clip")
        return values * _repeated(self._scales(parts), values)

    def _scales(self, parts: Parts) -> Float[Array, "*out groups"]:
        if self.nested:
            codes = parts["scales"].astype(jnp.int32)
            scales = jnp.take(jnp.asarray(self.scale_table, jnp.float32), codes, mode="clip")
            return scales * _repeated(parts["nested_scales"], scales) + parts["offset"]
        scales = parts["scales"].astype(jnp.float32)
        # broadcast: XLA turns a division by a scalar into a product with its reciprocal, which differs in the last bit
        return scales / jnp.broadcast_to(parts["divisor"], scales.shape) if self.divided else scales


@dataclasses.dataclass(frozen=True)
class Float4:
    """MXFP4 in the layout of GPU kernels, see `pallas_kernels.quant_matmul.reference`.

    Parts: ``codes`` int4 [*out, in], indices in the order of float4_e2m1fn; ``scales`` uint8 [in / group, *out],
    exponents.
    """

    group: int = 32

    def parts(self, inputs: int) -> dict[str, Part]:
        groups = _groups(inputs, self.group)
        return {"codes": Part((inputs,), "int4"), "scales": Part((groups,), "uint8", groups > 1, first=True)}

    def input_parts(self, inputs: int) -> dict[str, Part]:
        del inputs
        return {}

    def dequantize(self, parts: Parts) -> Float[Array, "*out k"]:
        codes, scales = parts["codes"], parts["scales"]
        inputs = codes.shape[-1]
        flat = quant_matmul.dequantized(codes.reshape(-1, inputs), scales.reshape(scales.shape[0], -1), e2m1=True)
        return flat.reshape(codes.shape)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """ggml blocks as llama.cpp stores them, byte for byte: part ``blocks`` uint8 [*out, in / elements, bytes].

    Attributes:
        kind: a name in `ggml.KINDS`: "Q2_K", "IQ4_XS", ...
    """

    kind: str

    def parts(self, inputs: int) -> dict[str, Part]:
        form = ggml.KINDS[self.kind]
        return {"blocks": Part((_groups(inputs, form.elements), form.bytes), "uint8")}

    def input_parts(self, inputs: int) -> dict[str, Part]:
        del inputs
        return {}

    def dequantize(self, parts: Parts) -> Float[Array, "*out k"]:
        blocks = parts["blocks"]
        values = ggml.KINDS[self.kind].dequantize(blocks)
        return values.reshape(*blocks.shape[:-2], -1)


def _groups(inputs: int, group: int) -> int:
    if group < 1 or inputs % group:
        raise ValueError(f"groups of {group} do not divide {inputs} inputs")
    return inputs // group


def _repeated(values: Array, like: Array) -> Array:
    """Repeat each value for the entries of ``like`` that share it; a single value is left to broadcasting."""
    return values if values.shape[-1] == 1 else jnp.repeat(values, like.shape[-1] // values.shape[-1], axis=-1)
