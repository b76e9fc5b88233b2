"""How tensors of a GGUF file are called in a checkpoint, and how what the converter changed of them is undone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from jaxinfer.weights.gguf.described import Described

# Corrections of routers, sinks and scales have whole names of their own.
_WITHOUT_KIND = ("_bias", ".sinks", "_scale", ".layer_scalar", ".experts.gate_up_proj", ".experts.down_proj")


@dataclasses.dataclass(frozen=True)
class Target:
    """A tensor, or the part of a stack that belongs to one expert, under its Hugging Face name.

    Attributes:
        order: by number of a row, where the file has it (None: rows stand as they are).
        shift: what is added to plain numbers.
        transposed: plain numbers stand as [in, out].
        matrix: a vector is a matrix of one row.
        expert: which matrix of a stack it is, or which row of one.
        rows: which rows of a fused matrix it is, from the first to before the second.
        columns: as ``order``, of the inputs of a matrix.
        undo: what makes the checkpoint's numbers of the file's; raises ValueError.
        taps: a matrix [channels, taps] is a convolution [channels, 1, taps].
        plain: it is no weight of a product, and cannot stay in blocks.
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
    """A tensor of the checkpoint that is in several of the file, or one in which the file has it turned.

    Of stacks [experts, out, in], or of biases [experts, out], the outputs are joined, and stacks are turned to
    [experts, in, out]. Of matrices [out, in] with an ``order`` the rows are.

    Attributes:
        parts: tensors of the file.
        interleaved: outputs of the parts take turns; otherwise they stand one part behind the other.
        order: by number of a row of the checkpoint's matrix, where it is among those of all parts.
    """

    name: str
    parts: tuple[str, ...]
    interleaved: bool
    order: Callable[[int], np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class Names:
    """Tensor names of one architecture.

    Attributes:
        whole: those outside of the layers, without ".weight".
        layers: what the names of all layers begin with.
        layer: those within a layer.
        stacks: of all experts: the whole name for one, with braces in the place of its number; those outside of layers
            are of as many matrices as there are.
        orders: of which the rows were moved, by what undoes it.
        shift: what the norms lack.
        transposed: matrices stand as [in, out].
        vectors: tensors that lost their first dimension, of size 1.
        joins: what several tensors of a layer become, and whether their outputs are ``interleaved``: see `Join`.
        row_orders: of joined matrices, by the name of what they become.
        amended: tensors of which more was changed, by what says how to undo it.
        kept: norms that are not shifted.
        fused_kv_heads: KV heads of a layer whose queries, keys and values stand in one; none: all layers have as many.
        behind: what the names of layers that predict further tokens begin with; none: what all do.
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
        """How many a stack holds: matrices of all experts, or rows of all heads; 0: it is none."""
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
    """What no product reads."""
    del model
    return dataclasses.replace(target, plain=True)


def fused_kv_heads(model: Described, layer: int) -> int:
    """What rows of a layer's ``attn_qkv`` leave for KV heads; a head is as large as the norm of queries."""
    heads, rows = model.heads, model.rows(f"blk.{layer}.attn_qkv.weight")
    size = math.prod(model.shapes.get(f"blk.{layer}.attn_q_norm.weight", ()))
    if not size or rows <= heads * size or rows % (2 * size) != heads * size % (2 * size):
        raise model.bad("attention.head_count", heads)
    return (rows // size - heads) // 2


def _turned(model: Described, heads: int) -> Callable[[int], np.ndarray]:
    """Order that puts rows of heads, whose pairs lie side by side, back to one half behind the other."""

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
    """Order that puts Falcon's queries, keys and values, one behind the other, back to groups of each KV head."""
    heads, kv_heads = model.heads, model.kv_heads

    def order(rows: int) -> np.ndarray:
        if heads % kv_heads or rows % (heads + 2 * kv_heads):
            raise model.bad("attention.head_count_kv", kv_heads)
        size = rows // (heads + 2 * kv_heads)
        ends = (heads * size, (heads + kv_heads) * size)
        parts = [part.reshape(kv_heads, -1) for part in np.split(np.arange(rows), ends)]
        return np.concatenate(parts, axis=1).reshape(-1)

    return order
