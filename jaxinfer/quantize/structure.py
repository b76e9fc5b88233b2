"""Places of a layer where scales of inputs can be folded, found by trying: the layer must compute the same.

A scale is a vector of powers of two here, so that a trial changes no bit of what it multiplies and divides again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxinfer.quantize.calibration import Batch, after, is_source, observed
from jaxinfer.quantize.layer import LayerWeights
from jaxinfer.types import ParamSpec
from jaxinfer.weights.tree import Path

Vector = Float[np.ndarray, " k"]

QKV, OUT = ("attention", "qkv"), ("attention", "out")
_OFFSETS = (0.0, 1.0)
_PAIR = 2
_SAME = 1e-3  # relative error of a token's hidden state
_MOST = 0.9  # of the tokens: a router that is nearly undecided may send one elsewhere


@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm and the weights that read its output.

    Attributes:
        scale: its scale, to which ``offset`` is added.
        readers: weights that read its output, and nothing else does.
    """

    scale: Path
    readers: tuple[Path, ...]
    offset: float = 0.0

    def divide(self, layer: LayerWeights, scale: Vector) -> None:
        """Divide what the norm returns."""
        values, bias = layer.values, (*self.scale[:-1], "bias")
        values[self.scale][:] = (values[self.scale] + self.offset) / scale - self.offset
        if bias in values:
            values[bias] /= scale


@dataclasses.dataclass(frozen=True)
class Structure:
    """Places of a layer where scales can be folded.

    Attributes:
        norms: norms before weights.
        heads: the values of attention are a factor of the inputs of its output projection.
        pairs: weights of which the second outputs of each pair are a factor of the inputs of the other weight.
    """

    norms: tuple[Norm, ...]
    heads: bool
    pairs: tuple[tuple[Path, Path], ...]


def observable(path: Path, spec: ParamSpec) -> bool:
    """Return whether statistics of a weight's inputs can be collected."""
    return spec.inputs is not None or path[-1] == "router"


def inputs_first(layer: LayerWeights, path: Path) -> bool:
    """Return whether the inputs of a weight are its first dimension, not its last."""
    return layer.specs[path].inputs == 0


def multiply(layer: LayerWeights, path: Path, scale: Vector, expert: int | None = None) -> None:
    """Multiply the columns of a weight, those of one expert or of all, by ``scale``."""
    value = layer.values[path] if expert is None else layer.values[path][expert]
    value *= scale.reshape(-1, *(1,) * (value.ndim - 1)) if inputs_first(layer, path) else scale


def divide_values(layer: LayerWeights, scale: Float[np.ndarray, "kv_heads dim"]) -> None:
    """Divide the values of attention."""
    layer.values[QKV][:, :, -1, :] /= scale
    if (bias := ("attention", "qkv_bias")) in layer.values:
        layer.values[bias][:, -1, :] /= scale


def divide_up(layer: LayerWeights, up: Path, scale: Vector, expert: int | None = None) -> None:
    """Divide the second outputs of a fused pair, those of one expert or of all."""
    for path, axes in ((up, (slice(None), None)), ((*up[:-1], f"{up[-1]}_bias"), (slice(None),))):
        if path in layer.values:
            value = layer.values[path] if expert is None else layer.values[path][expert]
            pairs = -len(axes) - 1  # the dimension of the pair
            np.moveaxis(value, pairs, 0)[1] /= scale[axes]


def structure_of(module: Any, layer: LayerWeights, batch: Batch) -> Structure:
    """Find where scales of inputs can be folded into a layer, by what it computes of the first sample of a batch.

    Values that other layers read, too, cannot be scaled.
    """
    trial = _Trial(module, layer, batch.first())
    heads = not is_source(module, layer.index) and trial.heads()
    return Structure(tuple(trial.norms()), heads, tuple(trial.pairs()))


class _Trial:
    """A layer and what it computes of one sample."""

    def __init__(self, module: Any, layer: LayerWeights, batch: Batch) -> None:
        self._module, self._layer, self._batch = module, layer, batch
        self._random = np.random.default_rng(0)
        self._before, self._expected = self._hidden(batch.carried), self._run()

    def _hidden(self, carried: Any) -> Float[np.ndarray, "t width"]:
        x = np.asarray(self._module.hidden(jax.tree.map(jnp.asarray, carried)), np.float64)[0]
        return x.reshape(len(x), -1)

    def _run(self) -> Float[np.ndarray, "t width"]:
        return self._hidden(after(self._module, self._layer, self._batch)[0])

    def _scale(self, size: int) -> Vector:
        return self._random.choice(np.asarray([0.5, 2.0], np.float32), size)

    def _same(self, change: Callable[[], None]) -> bool:
        """Return whether the layer computes the same with a change."""
        change()
        moved = np.linalg.norm(self._expected - self._before, axis=-1)
        error = np.linalg.norm(self._run() - self._expected, axis=-1)
        return bool((error < _SAME * moved).mean() >= _MOST)

    # ---- norms

    def norms(self) -> Iterator[Norm]:
        """Yield the norms of which all readers are known."""
        before = self._totals()
        scales = [path for path, value in self._layer.values.items() if path[-1] == "scale" and value.ndim == 1]
        for path in scales:
            found = (self._norm(path, offset, before) for offset in _OFFSETS)
            yield from (norm for norm in found if norm is not None)

    def _norm(self, path: Path, offset: float, before: dict[Path, Vector]) -> Norm | None:
        scale, alone = self._scale(len(self._layer.values[path])), Norm(path, (), offset)
        kept = self._kept(alone)
        alone.divide(self._layer, scale)
        after = self._totals()
        self._layer.values.update(kept)
        readers = tuple(
            each
            for each, total in before.items()
            if total.shape == scale.shape and total.any() and np.allclose(after[each] * scale, total, rtol=_SAME)
        )
        beside = self._beside(readers, len(scale))
        unobserved = tuple(each for each in beside if each not in before)
        for more in (beside, unobserved, ()) if readers else ():
            norm = Norm(path, (*readers, *more), offset)
            if self._folds(norm, scale):
                return norm
        return None

    def _kept(self, norm: Norm) -> dict[Path, np.ndarray]:
        paths = (norm.scale, (*norm.scale[:-1], "bias"))
        return {path: self._layer.values[path].copy() for path in paths if path in self._layer.values}

    def _totals(self) -> dict[Path, Vector]:
        """Return the sums of the absolute inputs of all weights, of experts together."""
        paths = tuple(path for path, spec in self._layer.specs.items() if observable(path, spec))
        seen = observed(self._module, self._layer, paths, [self._batch], gram=False)
        return {path: np.asarray(each.total).reshape(-1, each.total.shape[-1]).sum(0) for path, each in seen.items()}

    def _beside(self, readers: tuple[Path, ...], inputs: int) -> tuple[Path, ...]:
        """Return other matrices next to the readers that may read the same: as that of a gate, whose inputs are not
        observed, or of experts whose inputs are weighted."""
        modules = {path[:-1] for path in readers}
        return tuple(
            path
            for path, spec in self._layer.specs.items()
            if path[:-1] in modules and path not in readers and len(spec.shape) > 1
            if spec.shape[0 if inputs_first(self._layer, path) else -1] == inputs
        )

    def _folds(self, norm: Norm, scale: Vector) -> bool:
        kept = self._kept(norm)

        def change() -> None:
            norm.divide(self._layer, scale)
            for path in norm.readers:
                multiply(self._layer, path, scale)

        same = self._same(change)
        for path in norm.readers:
            multiply(self._layer, path, 1.0 / scale)
        self._layer.values.update(kept)
        return same

    # ---- values and pairs

    def heads(self) -> bool:
        """Return whether values can be scaled down and the output projection up."""
        specs = self._layer.specs
        if QKV not in specs or OUT not in specs or len(specs[QKV].shape) != len(("d", "kv_heads", "group", "dim")):
            return False
        kv_heads, group, dim = specs[QKV].shape[1:]
        if self._layer.values[OUT].shape[0] != kv_heads * (group - 2) * dim:
            return False
        scale = self._scale(kv_heads * dim).reshape(kv_heads, dim)

        def change(scale: np.ndarray = scale) -> None:
            divide_values(self._layer, scale)
            multiply(self._layer, OUT, of_queries(scale[None], group - 2)[0])

        same = self._same(change)
        change(1.0 / scale)
        return same

    def pairs(self) -> Iterator[tuple[Path, Path]]:
        """Yield the weights of gates and their other factor with the weight that reads the product."""
        for up in self._layer.specs:
            down = (*up[:-1], "down")
            if up[-1] != "gate_up" or down not in self._layer.specs or self._layer.specs[up].shape[-3] != _PAIR:
                continue
            scale = self._scale(self._layer.values[up].shape[-2])

            def change(scale: Vector = scale, up: Path = up, down: Path = down) -> None:
                divide_up(self._layer, up, scale)
                multiply(self._layer, down, scale)

            same = self._same(change)
            change(1.0 / scale)
            if same:
                yield up, down


def of_queries(scales: Float[np.ndarray, "points kv_heads dim"], group: int) -> Float[np.ndarray, "points k"]:
    """Return scales of values for the inputs of the output projection: the queries of a group share a value."""
    points, kv_heads, dim = scales.shape
    return np.broadcast_to(scales[:, :, None], (points, kv_heads, group, dim)).reshape(points, -1)
