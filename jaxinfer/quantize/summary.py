"""Summary of a quantisation: the quantised kinds of weights with their errors, and the kinds that stayed
unquantized."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxinfer.quant.make.recipe import Recipe
from jaxinfer.quantize.layer import Linear

_LAYER = re.compile(r"^.*?\.?\d+\.")  # up to and including the layer's number
_NUMBER = re.compile(r"\.\d+(?=\.)")  # index of an expert


@dataclasses.dataclass
class Kind:
    """The weights of one name and shape in all layers.

    Attributes:
        name: name within a layer; all experts are one kind.
        reason: why they stay unquantized; "": they are quantised.
        count: number in all layers, including those of a resumed run.
        starved: number rounded to nearest because too few sample tokens reached them.
    """

    name: str
    shape: tuple[int, int]
    reason: str
    count: int = 0
    starved: int = 0
    _squares: float = 0.0
    _lost: float = 0.0

    def add(self, weight: np.ndarray, made: np.ndarray) -> None:
        """Add the error of a weight and its dequantized form."""
        self._squares += float(np.square(weight, dtype=np.float64).sum())
        self._lost += float(np.square(weight.astype(np.float64) - made).sum())

    @property
    def error(self) -> float | None:
        """Norm of the difference over the norm of the weights; None: no weight was quantised in this run."""
        return math.sqrt(self._lost / self._squares) if self._squares else None


class Summary:
    """Kinds of the weights of all layers.

    Args:
        layers: the linear weights of each layer.
    """

    def __init__(self, recipe: Recipe, layers: Iterable[Sequence[Linear]]) -> None:
        self._recipe = recipe
        self._kinds: dict[tuple[str, tuple[int, int]], Kind] = {}
        for linear in (linear for layer in layers for linear in layer):
            key = (kind_name(linear.module), linear.shape)
            self._kinds.setdefault(key, Kind(*key, recipe.refusal(*linear.shape))).count += 1

    def kind(self, linear: Linear) -> Kind:
        return self._kinds[kind_name(linear.module), linear.shape]

    @property
    def quantized(self) -> list[Kind]:
        return [kind for kind in self._kinds.values() if not kind.reason]

    @property
    def kept(self) -> list[Kind]:
        return [kind for kind in self._kinds.values() if kind.reason]

    @property
    def advice(self) -> str:
        """Flag with which more weights would be quantised; "": there is none."""
        return self._recipe.advice([kind.shape[1] for kind in self._kinds.values()]) if self.kept else ""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the printed summary."""
        kinds = self._kinds.values()
        width = max((len(kind.name) for kind in kinds), default=0)
        yield f"quantised ({self._recipe.method}): {_counted(self.quantized)}"
        yield from (_line(kind, width, _made(kind)) for kind in self.quantized)
        yield f"kept: {f'{_counted(self.kept)}, and ' if self.kept else ''}what lies outside of the layers"
        yield from (_line(kind, width, kind.reason) for kind in self.kept)
        if self.advice:
            yield f"to quantise these, too: {self.advice}"


def kind_name(module: str) -> str:
    """Return the name within a layer: ``model.layers.3.mlp.experts.7.up_proj`` is ``mlp.experts.*.up_proj``."""
    return _NUMBER.sub(".*", _LAYER.sub("", module, count=1))


def _counted(kinds: Sequence[Kind]) -> str:
    count = sum(kind.count for kind in kinds)
    return f"{count} weight{'s' * (count != 1)} of {len(kinds)} kind{'s' * (len(kinds) != 1)}"


def _line(kind: Kind, width: int, words: str) -> str:
    out, inputs = kind.shape
    return f"  {kind.name:<{width}}  {kind.count} of {out} x {inputs}: {words}"


def _made(kind: Kind) -> str:
    words = "made by an earlier run" if kind.error is None else f"relative error {100 * kind.error:.3g} %"
    few = f", {kind.starved} rounded to nearest for want of samples that came by" if kind.starved else ""
    return words + few
