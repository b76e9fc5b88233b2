"""Folding of AWQ's and SmoothQuant's input scales into preceding layers, where the `Structure` of a layer allows it.

Dividing the output of a norm (or of the preceding layer) by s, and multiplying the columns of all weights that read it
by s, changes nothing except rounding errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxinfer.quant.activation_hooks import InputStatistics
from jaxinfer.quant.make import awq
from jaxinfer.quant.make.gptq import enough_tokens
from jaxinfer.quant.make.grid import IntegerGrid
from jaxinfer.quant.make.recipe import Recipe, whole_groups
from jaxinfer.quant.make.smoothquant import smoothing
from jaxinfer.quantize.layer import LayerWeights
from jaxinfer.quantize.structure import (
    OUT,
    QKV,
    Norm,
    Structure,
    Vector,
    divide_up,
    divide_values,
    inputs_first,
    multiply,
    of_queries,
)
from jaxinfer.weights.tree import Path

Statistics = dict[Path, InputStatistics]


@dataclasses.dataclass(frozen=True)
class Folder:
    """Folds scales into a layer's weights, and updates the statistics of their inputs."""

    layer: LayerWeights
    statistics: Statistics
    recipe: Recipe
    grid: IntegerGrid
    structure: Structure

    def fold(self) -> None:
        """Fold scales on the host, where statistics are copied first: the work is small, one expert at a time."""
        for path, seen in self.statistics.items():
            self.statistics[path] = jax.tree.map(np.asarray, seen)
        for norm in self.structure.norms:
            weights = [path for path in norm.readers if self.layer.specs[path].inputs is not None]
            if not weights:
                continue
            scale = self._smoothing(weights) if self.recipe.method == "smoothquant" else self._search(norm, weights)
            norm.divide(self.layer, scale)
            for path in norm.readers:
                self._multiply(path, scale)
        if self.recipe.method == "awq":
            if self.structure.heads:
                self._fold_values()
            for up, down in self.structure.pairs:
                self._fold_pair(up, down)

    def _smoothing(self, read: Sequence[Path]) -> Vector:
        """Return SmoothQuant's scales over the quantised weights, which exclude routers."""
        inputs = np.max(
            [np.asarray(self.statistics[path].largest).reshape(-1, self._width(path)).max(0) for path in read], 0
        )
        weights = np.max([np.abs(matrix).max(0) for path in read for matrix, _ in self._matrices(path)], 0)
        return np.asarray(smoothing(jnp.asarray(inputs), jnp.asarray(weights), self.recipe.alpha))

    def _search(self, norm: Norm, read: Sequence[Path]) -> Vector:
        """Search AWQ's scale for the inputs that all readers of a norm share."""
        every = next((path for path in norm.readers if path[-1] == "router"), read[0])
        magnitude = _means(self.statistics[every])
        matrices = [pair for path in read for pair in self._matrices(path)]
        return self._best(magnitude, matrices, lambda scale: scale)

    def _best(
        self,
        magnitude: Vector,
        matrices: list[tuple[Float[np.ndarray, "_ _"], InputStatistics]],
        spread: Callable[[np.ndarray], np.ndarray],
    ) -> Vector:
        """Return the scales with the least loss over all matrices; ``spread`` expands them to the inputs."""
        scales = np.asarray(awq.candidates(jnp.asarray(magnitude, jnp.float32)))
        inputs, losses = spread(scales), np.zeros(len(scales))
        for matrix, seen in matrices:
            if enough_tokens(float(seen.rows), matrix.shape[1]):
                weight, gram = whole_groups(jnp.asarray(matrix), jnp.asarray(seen.gram), self.grid)
                filled = np.pad(inputs, ((0, 0), (0, weight.shape[1] - inputs.shape[1])), constant_values=1.0)
                losses += np.asarray(awq.losses(weight, gram, jnp.asarray(filled), self.grid))
        return scales[int(np.argmin(losses))]

    def _fold_values(self) -> None:
        """Scale values down and the output projection up; all queries of a group share the channels of the value."""
        kv_heads, parts, dim = self.layer.values[QKV].shape[1:]
        mean = _means(self.statistics[OUT]).reshape(kv_heads, parts - 2, dim).mean(1)

        def spread(scales: np.ndarray) -> np.ndarray:
            return of_queries(scales.reshape(-1, kv_heads, dim), parts - 2)

        scale = self._best(mean.reshape(-1), list(self._matrices(OUT)), spread)
        divide_values(self.layer, scale.reshape(kv_heads, dim))
        self._multiply(OUT, spread(scale[None])[0])

    def _fold_pair(self, up: Path, down: Path) -> None:
        """Scale the outputs of ``up``, which are a factor of the inputs of ``down``, for each expert."""
        experts = self.layer.specs[down].axes[0] == "expert"
        for index, (matrix, seen) in enumerate(self._matrices(down)):
            if enough_tokens(float(seen.rows), matrix.shape[1]):
                scale = self._best(_means(seen), [(matrix, seen)], lambda scales: scales)
                divide_up(self.layer, up, scale, index if experts else None)
                self._multiply(down, scale, index if experts else None)

    def _width(self, path: Path) -> int:
        return int(self.statistics[path].largest.shape[-1])

    def _matrices(self, path: Path) -> Iterator[tuple[Float[np.ndarray, "_ _"], InputStatistics]]:
        """Yield the weight as [out, in] with its statistics, for each expert if there are several."""
        value, seen = self.layer.values[path], self.statistics[path]
        if inputs_first(self.layer, path):
            yield np.ascontiguousarray(value.reshape(value.shape[0], -1).T), seen
        elif self.layer.specs[path].axes[0] == "expert":
            for index in range(value.shape[0]):
                yield value[index].reshape(-1, value.shape[-1]), _of_expert(seen, index)
        else:
            yield value.reshape(-1, value.shape[-1]), seen

    def _multiply(self, path: Path, scale: Vector, expert: int | None = None) -> None:
        """Multiply the columns of a weight by ``scale``, and divide the statistics of its inputs by it."""
        multiply(self.layer, path, scale, expert)
        if path in self.statistics:
            self.statistics[path] = _divided(self.statistics[path], scale, expert)


def _divided(seen: InputStatistics, scale: Vector, expert: int | None) -> InputStatistics:
    """Return the statistics of inputs (of one expert) after their division."""
    if expert is not None:
        divided = _divided(_of_expert(seen, expert), scale, None)
        parts = [part.copy() for part in seen]
        for part, new in zip(parts, divided, strict=True):
            part[expert] = new
        return InputStatistics(*parts)
    gram = seen.gram / np.outer(scale, scale) if np.ndim(seen.gram) else seen.gram
    return InputStatistics(seen.rows, gram, seen.largest / scale, seen.total / scale)


def _of_expert(seen: InputStatistics, expert: int) -> InputStatistics:
    return InputStatistics(*(part[expert] if np.ndim(part) else part for part in seen))


def _means(seen: InputStatistics) -> Vector:
    """Return the means of the absolute values of each input, over all experts."""
    total, rows = np.asarray(seen.total), np.sum(np.asarray(seen.rows))
    return np.asarray(total.reshape(-1, total.shape[-1]).sum(0) / np.maximum(rows, 1.0))
