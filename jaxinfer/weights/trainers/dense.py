"""Dense decoders as trainers name them: the tables of `tunix`, `maxtext` and `levanter` are made for one of these."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.types import EMBEDDING, VISION, ParamSpec
from jaxinfer.weights.trainers.rows import Row, Template
from jaxinfer.weights.tree import Path

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
Table = dict[str, Row]


@dataclasses.dataclass(frozen=True)
class Dense:
    """A decoder of attention and gated MLPs.

    Attributes:
        tensors: shapes of its Hugging Face tensors, by name.
        sizes: by letter: V vocabulary, D hidden size, N heads, K KV heads, G heads of a KV head, H head dimension, Q
            that of all heads, P that of all KV heads, F MLP size.
        layers: number of layers.
        scale: scale of attention scores.
        gemma: norm scales are stored minus one, and embeddings are multiplied by sqrt(D).
    """

    tensors: Mapping[str, tuple[int, ...]]
    sizes: Mapping[str, int]
    layers: int
    scale: float
    gemma: bool

    def has(self, suffix: str) -> bool:
        """Return whether the first layer has a tensor."""
        return f"model.layers.0.{suffix}" in self.tensors


@dataclasses.dataclass(frozen=True)
class Place:
    """Position of a layer in the tree of a trainer.

    Attributes:
        prefix: what precedes the names of its arrays.
        kind: what is appended to the first component of the names.
        axis: position of the axis of layers in the arrays (None: each layer has its own arrays).
    """

    prefix: str
    kind: str = ""
    axis: int | None = None

    def name(self, own: str) -> str:
        """Return the whole name of an array of the layer."""
        first, dot, rest = own.partition(".")
        return f"{self.prefix}{first}{self.kind}{dot}{rest}"


def dense_of(specs: Mapping[Path, ParamSpec], config: Any) -> Dense | None:
    """Return the model as a dense decoder, from its parameters and their Hugging Face tensors; None: it is none."""
    own = {path: spec for path, spec in specs.items() if path[0] != VISION}
    tensors = {source.name: source.shape for spec in own.values() for source in spec.sources}
    first = ("layers_0", "attention", "qkv"), ("layers_0", "mlp", "gate_up"), ("final_norm", "scale")
    query, key = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
    if not {*first, EMBEDDING} <= own.keys() or not {query, key} <= tensors.keys():
        return None
    (vocab, d), dim, hidden = own[EMBEDDING].shape, own[first[0]].shape[-1], own[first[1]].shape[-2]
    heads, kv_heads = tensors[query][0] // dim, tensors[key][0] // dim
    sizes = {"V": vocab, "D": d, "N": heads, "K": kv_heads, "G": heads // kv_heads, "H": dim, "F": hidden}
    sizes |= {"Q": heads * dim, "P": kv_heads * dim}
    scale = getattr(config, "scale", dim**-0.5)
    return Dense(tensors, sizes, len(config.layers), scale, own[first[2]].init == "zeros")


def table_of(
    dense: Dense, top: Mapping[str, Template], layer: Mapping[str, Template], place: Callable[[int], Place]
) -> Table:
    """Return the rows of a model by the names of a trainer; {} if a tensor of the model has no template.

    Args:
        top: templates by the tensors outside the layers.
        layer: templates by the tensors of a layer; those of one name are stacked.
        place: the position of each layer.
    """
    found: dict[str, tuple[Template, int | None, list[str]]] = {}
    for tensor, shape in dense.tensors.items():
        match = _LAYER.fullmatch(tensor)
        template, where = (top.get(tensor), Place("")) if match is None else (layer.get(match[2]), place(int(match[1])))
        if template is None or math.prod(dense.sizes[axis] for axis in template.axes) != math.prod(shape):
            return {}
        name = template.name if match is None else where.name(template.name)
        found.setdefault(name, (template, where.axis, []))[2].append(tensor)
    return {
        name: template.row(tuple(tensors), dense.tensors[tensors[0]], dense.sizes, axis)
        for name, (template, axis, tensors) in found.items()
    }
