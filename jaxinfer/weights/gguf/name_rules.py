"""Data types of the GGUF name mapping: renaming of tensors, and the inverse of the converter's changes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from jaxinfer.weights.gguf.header_view import Described

# Complete names, which take no ".weight" or ".bias": router corrections, sinks and scales.
_WITHOUT_KIND = ("_bias", ".sinks", "_scale", ".layer_scalar", ".experts.gate_up_proj", ".experts.down_proj")


@dataclasses.dataclass(frozen=True)
class Target:
    """A tensor, or the slice of a stack that belongs to one expert, under its Hugging Face name.

    Attributes:
        order: given the number of rows, returns the index of each row in the file (None: unchanged).
        shift: value added to unquantized values.
        transposed: unquantized values are stored as [in, out].
        matrix: a vector becomes a matrix with one row.
        expert: index of the matrix in a stack, or of the row in a matrix.
        rows: start and stop of the rows of a fused matrix.
        columns: like ``order``, for the inputs of a matrix.
        undo: inverse of a change to the values; raises ValueError.
        taps: a matrix [channels, taps] becomes a convolution [channels, 1, taps].
        plain: no product reads it as a weight, so it must be dequantized.
    """

    name: str
    order: Callable[[int], np.ndarray] | None = None
    shift: float = 0.0
    transposed: bool = False
    matrix: bool = False
    expert: int | None = None
    rows: tuple[int, int] | None = None
    columns: Callable[[int], np.ndarray] | None = None
    undo: Callable[[np.ndarray], np.ndarray] | None = None
    taps: bool = False
    plain: bool = False


@dataclasses.dataclass(frozen=True)
class Join:
    """A checkpoint tensor that is split over several tensors of the file, or transposed in the file.

    For stacks [experts, out, in] and biases [experts, out] the outputs are joined, and stacks are transposed to
    [experts, in, out]. For matrices [out, in] with an ``order`` the rows are joined.

    Attributes:
        parts: tensors of the file.
        interleaved: outputs of the parts alternate; otherwise the parts are concatenated.
        order: given the number of rows, returns the index of each row among the rows of all parts.
    """

    name: str
    parts: tuple[str, ...]
    interleaved: bool
    order: Callable[[int], np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class Names:
    """Tensor names of one architecture.

    Attributes:
        whole: names outside of the layers, without ".weight".
        layers: name prefix of all layers.
        layer: names within a layer.
        stacks: full names of stacks, with braces for the expert's number; a stack outside of the layers has as many
            matrices as its first dimension.
        orders: inverse row permutations, by tensor.
        shift: value to add to the norms.
        transposed: matrices stored as [in, out].
        vectors: tensors that lost their first dimension, of size 1.
        joins: tensors of a layer to join, by the result's name; ``interleaved`` if outputs alternate: see `Join`.
        row_orders: row orders of joined matrices, by the result's name.
        amended: further inverse changes, by tensor.
        kept: norms without a shift.
        fused_kv_heads: returns the KV heads of a layer with fused QKV; None: the same in all layers.
        behind: name prefix of multi-token prediction layers; empty: the same as other layers.
    """

    whole: Mapping[str, str]
    layers: str
    layer: Mapping[str, str]
    stacks: Mapping[str, str] = MappingProxyType({})
    orders: Mapping[str, Callable[[Described], Callable[[int], np.ndarray]]] = MappingProxyType({})
    shift: float = 0.0
    transposed: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    joins: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    interleaved: bool = False
    row_orders: Mapping[str, Callable[[Described], Callable[[int], np.ndarray]]] = MappingProxyType({})
    amended: Mapping[str, Callable[[Described, Target], Target]] = MappingProxyType({})
    kept: tuple[str, ...] = ()
    fused_kv_heads: Callable[[Described, int], int] | None = None
    behind: str = ""

    @property
    def joined(self) -> frozenset[str]:
        return frozenset(part for parts in self.joins.values() for part in parts)

    def stacked(self, model: Described, stem: str, shape: tuple[int, ...]) -> int:
        """Return the number of entries of a stack: matrices of all experts, or rows of all heads; 0 if it is none."""
        if stem.endswith("_exps"):
            return model.experts if shape[:-2] == (model.experts,) else 0
        return shape[0] if shape[:-1] in ((model.heads,), (model.kv_heads,)) else 0

    def target(self, model: Described, stem: str, name: str | None, kind: str, original: str) -> Target:
        if name is None:
            return Target(original)
        full = name if not kind or name.endswith(_WITHOUT_KIND) else f"{name}.{kind}"
        shifted = stem.endswith("norm") and stem not in self.kept and kind == "weight"
        target = Target(
            full,
            order=self.orders[stem](model) if stem in self.orders else None,
            shift=self.shift if shifted else 0.0,
            transposed=kind == "weight" and stem in self.transposed,
            matrix=stem in self.vectors,
        )
        return self.amended[stem](model, target) if stem in self.amended else target


def in_numbers(model: Described, target: Target) -> Target:
    """Mark a tensor that no product reads, which must be dequantized."""
    del model
    return dataclasses.replace(target, plain=True)


def fused_kv_heads(model: Described, layer: int) -> int:
    """Return the number of KV heads that the rows of ``attn_qkv`` leave; the head size is that of the query norm."""
    heads, rows = model.heads, model.rows(f"blk.{layer}.attn_qkv.weight")
    size = math.prod(model.shapes.get(f"blk.{layer}.attn_q_norm.weight", ()))
    if not size or rows <= heads * size or rows % (2 * size) != heads * size % (2 * size):
        raise model.bad("attention.head_count", heads)
    return (rows // size - heads) // 2


def _turned(model: Described, heads: int) -> Callable[[int], np.ndarray]:
    """Return the order that converts rows of heads from interleaved RoPE pairs back to two halves."""

    def order(rows: int) -> np.ndarray:
        if rows % (2 * heads):
            raise model.bad("attention.head_count", heads)
        return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)

    return order


def turned_queries(model: Described) -> Callable[[int], np.ndarray]:
    return _turned(model, model.heads)


def turned_keys(model: Described) -> Callable[[int], np.ndarray]:
    return _turned(model, model.kv_heads)


def grouped(model: Described) -> Callable[[int], np.ndarray]:
    """Return the order that regroups Falcon's concatenated queries, keys and values by KV head."""
    heads, kv_heads = model.heads, model.kv_heads

    def order(rows: int) -> np.ndarray:
        if heads % kv_heads or rows % (heads + 2 * kv_heads):
            raise model.bad("attention.head_count_kv", kv_heads)
        size = rows // (heads + 2 * kv_heads)
        ends = (heads * size, (heads + kv_heads) * size)
        parts = [part.reshape(kv_heads, -1) for part in np.split(np.arange(rows), ends)]
        return np.concatenate(parts, axis=1).reshape(-1)

    return order
