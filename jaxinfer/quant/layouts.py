"""Layouts of a weight ``[*out, in]`` that is not an array of floats: which arrays store it, and what they mean.

A layout is static: it is a part of a compiled program. Its arrays are of two kinds. *Parts* begin with the weight's own
``out`` dimensions, so that they are spread over devices, stacked and cut as the weight is; *input parts* are the same
for all outputs. `Quantized` (storage.py) holds the arrays.
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
    """One array of a stored weight: ``[*out, *shape]``, an input part's just ``shape``.

    Attributes:
        shape: its own dimensions. Of several, the first is the one that runs along the weight's inputs.
        dtype: a name that numpy or ml_dtypes knows.
        along: ``shape[0]`` runs along the inputs: it is cut where they are. False: every piece needs all of it.
        first: ``shape`` comes before the outputs, ``[*shape, *out]``.
    """

    shape: tuple[int, ...]
    dtype: str
    along: bool = True
    first: bool = False


@runtime_checkable
class Layout(Protocol):
    """A kind of storage with its parameters: hashable, and equal where weights can be stacked into one."""

    def parts(self, inputs: int) -> dict[str, Part]:
        """The arrays of a weight with so many inputs, by name; ValueError where they cannot be stored so."""
        ...

    def input_parts(self, inputs: int) -> dict[str, Part]:
        """The arrays that all outputs share."""
        ...

    def dequantize(self, parts: Parts) -> Float[Array, "*out k"]:
        """The weight in float32, to the last bit (outside of jit) as the tool that made it has it.

        Columns stand as they are stored: ``order``, if there is such an input part, is left to the caller.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Grouped:
    """weight = (codes - zeros) * scales * factor, with a scale for each ``group`` neighbours along the inputs.

    Parts: ``codes`` [*out, in]; ``scales`` [*out, in / group]; with ``zeros`` also ``zeros`` int8 [*out, in / group];
    with ``biased`` ``biases`` [*out, in / group] of the scales' dtype: weight = (codes + biased) * scales + biases.
    Input parts: with ``ordered``, ``order`` int32 [in]: at which input a stored column stands; columns of a group lie
    side by side, whatever their inputs (act-order, Frantar et al. 2022). With ``static``, ``input_scale`` float32 [].

    Attributes:
        codes: "int4" (-8 to 7), "int8" or "float8_e4m3fn". Tools that count from 0 are moved down by half the range.
        group: how many inputs share a scale; all of them: one scale a channel.
        scales: dtype of the scales.
        zeros: there are zero points.
        biased: what codes were moved down by where a group has a bias, MLX's kind of zero point; 0: there are none.
        factor: of the whole weight.
        ordered: columns are not in the order of the inputs.
        activations: what inputs are rounded to before the product: "" (nothing), "int8" or "float8_e4m3fn", a scale
            for each token and ``activation_group`` inputs (0: all).
        activation_bound: of what a scale of inputs is made of: larger inputs become it; 0: there is none.
        static: inputs have one scale, from the checkpoint, instead.
        groups_first: scales and zeros lie as [in / group, *out], as the kernels of a GPU read them.
        int8_steps: what the largest input of a token becomes in "int8". compressed-tensors has 127.5: whether such a
            number becomes -127 or -128 hangs on its last bit. 127 hangs on nothing.
        outliers: inputs of this size or more are not rounded but have a product of their own (LLM.int8(), Dettmers et
            al. 2022, here token by token); 0: all are rounded.
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
    """weight = table[codes] * scale, with a scale for each ``group`` neighbours along the inputs.

    Parts: ``codes`` uint4 [*out, in], ``scales`` [*out, in / group]. With ``divided`` also ``divisor`` float32
    [*out, 1]: scales are divided by it first (NVFP4). With ``nested`` scales are themselves codes (double
    quantisation, Dettmers et al. 2023): scale = scale_table[scales] * nested_scales + offset, of ``nested_scales``
    float32 [*out, in / nested] and ``offset`` float32 [*out, 1].

    Attributes:
        table: 16 values.
        group: how many inputs share a scale.
        scales: dtype of the scales; "float8_e8m0fnu" are powers of two (MXFP4), "uint8" codes of ``scale_table``.
        divided: see above.
        nested: how many inputs share a nested scale; 0: scales are plain.
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
        # in full: XLA turns a division by one number for many into a product with its reciprocal, one bit off
        return scales / jnp.broadcast_to(parts["divisor"], scales.shape) if self.divided else scales


@dataclasses.dataclass(frozen=True)
class Float4:
    """MXFP4 as a GPU's kernels read it, see `pallas_kernels.quant_matmul.reference`.

    Parts: ``codes`` int4 [*out, in], places in the order of float4_e2m1fn; ``scales`` uint8 [in / group, *out],
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
    """Blocks of ggml as llama.cpp stores them, byte for byte: part ``blocks`` uint8 [*out, in / elements, bytes].

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
    """Repeat each value for the entries of ``like`` that share it; one for all is left to broadcasting."""
    return values if values.shape[-1] == 1 else jnp.repeat(values, like.shape[-1] // values.shape[-1], axis=-1)
