"""Folding of AWQ's and SmoothQuant's input scales into preceding layers, for blocks of known structure.

Dividing the output of a norm (or of the preceding layer) by s, and multiplying the columns of all weights that read it
by s, changes nothing except rounding errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxinfer.layers.base import Layer
from jaxinfer.layers.moe import GLU
from jaxinfer.models.families.llama import LlamaBlock
from jaxinfer.models.families.sparse import SparseBlock
from jaxinfer.quant.activation_hooks import InputStatistics
from jaxinfer.quant.make import awq
from jaxinfer.quant.make.gptq import enough_tokens
from jaxinfer.quant.make.grid import IntegerGrid
from jaxinfer.quant.make.recipe import Recipe, whole_groups
from jaxinfer.quant.make.smoothquant import smoothing
from jaxinfer.quantize.layer import LayerWeights
from jaxinfer.weights.tree import Path

Statistics = dict[Path, InputStatistics]
Vector = Float[np.ndarray, " k"]

_NORMS: tuple[tuple[Path, tuple[Path, ...]], ...] = (
    (("attention_norm", "scale"), (("attention", "qkv"),)),
    (
        ("mlp_norm", "scale"),
        (
            ("mlp", "gate_up"),
            ("mlp", "shared", "gate_up"),
            ("mlp", "router"),
            ("mlp", "shared_gate"),
        ),
    ),
)
_PAIRS: tuple[tuple[Path, Path], ...] = (
    (("mlp", "gate_up"), ("mlp", "down")),
    (("mlp", "shared", "gate_up"), ("mlp", "shared", "down")),
)


def can_fold(block: Layer) -> bool:
    """Return whether a block's structure is known here: a subclass may compute something else."""
    plain = not isinstance(block, SparseBlock) or isinstance(block.config.glu, GLU)  # up is a factor of down's inputs
    return type(block) in (LlamaBlock, SparseBlock) and plain


@dataclasses.dataclass(frozen=True)
class Folder:
    """Folds scales into a layer's weights, and updates the statistics of their inputs."""

    layer: LayerWeights
    statistics: Statistics
    recipe: Recipe
    grid: IntegerGrid

    def fold(self) -> None:
        """Fold scales on the host, where statistics are copied first: the work is small, one expert at a time."""
        for path, seen in self.statistics.items():
            self.statistics[path] = jax.tree.map(np.asarray, seen)
        for norm, readers in _NORMS:
            present = tuple(path for path in readers if path in self.layer.values)
            scale = self._smoothing(present) if self.recipe.method == "smoothquant" else self._search(present)
            self.layer.values[norm][:] /= scale
            for path in present:
                self._multiply(path, scale)
        if self.recipe.method == "awq":
            self._fold_values()
            for up, down in _PAIRS:
                if down in self.layer.values:
                    self._fold_pair(up, down)

    def _smoothing(self, readers: tuple[Path, ...]) -> Vector:
        """Return SmoothQuant's scales over the quantised weights, which exclude routers."""
        read = [path for path in readers if path in self.statistics and path[-1] != "router"]
        inputs = np.max(
            [np.asarray(self.statistics[path].largest).reshape(-1, self._width(path)).max(0) for path in read], 0
        )
        weights = np.max([np.abs(matrix).max(0) for path in read for matrix, _ in self._matrices(path)], 0)
        return np.asarray(smoothing(jnp.asarray(inputs), jnp.asarray(weights), self.recipe.alpha))

    def _search(self, readers: tuple[Path, ...]) -> Vector:
        """Search AWQ's scale for the inputs that all readers of a norm share."""
        every = next((path for path in readers if path[-1] == "router"), readers[0])
        magnitude = _means(self.statistics[every])
        read = [path for path in readers if path[-1] not in ("router", "shared_gate")]
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
        qkv, out = self.layer.values["attention", "qkv"], ("attention", "out")
        kv_heads, group, dim = qkv.shape[1], qkv.shape[2] - 2, qkv.shape[3]
        mean = _means(self.statistics[out]).reshape(kv_heads, group, dim).mean(1)

        def spread(scales: np.ndarray) -> np.ndarray:
            each = scales.reshape(-1, kv_heads, 1, dim)
            return np.broadcast_to(each, (len(each), kv_heads, group, dim)).reshape(len(each), -1)

        scale = self._best(mean.reshape(-1), list(self._matrices(out)), spread)
        per_head = scale.reshape(kv_heads, dim)
        qkv[:, :, -1, :] /= per_head
        if ("attention", "qkv_bias") in self.layer.values:
            self.layer.values["attention", "qkv_bias"][:, -1, :] /= per_head
        self._multiply(out, spread(scale[None])[0])

    def _fold_pair(self, up: Path, down: Path) -> None:
        """Scale the outputs of ``up``, which are a factor of the inputs of ``down``, for each expert."""
        for index, (matrix, seen) in enumerate(self._matrices(down)):
            if not enough_tokens(float(seen.rows), matrix.shape[1]):
                continue
            scale = self._best(_means(seen), [(matrix, seen)], lambda scales: scales)
            values = self.layer.values
            place = (index,) if values[up].ndim == 4 else ()
            values[up][(*place, 1)] /= scale[:, None]
            bias = (*up[:-1], "gate_up_bias")
            if bias in values:
                values[bias][(*place, 1)] /= scale
            self._multiply(down, scale, index if place else None)

    def _width(self, path: Path) -> int:
        return int(self.statistics[path].largest.shape[-1])

    def _matrices(self, path: Path) -> Iterator[tuple[Float[np.ndarray, "_ _"], InputStatistics]]:
        """Yield the weight as [out, in] with its statistics, for each expert if there are several."""
        value, seen = self.layer.values[path], self.statistics[path]
        if self._inputs_first(path):
            yield np.ascontiguousarray(value.reshape(value.shape[0], -1).T), seen
        elif self.layer.specs[path].axes[0] == "expert":
            for index in range(value.shape[0]):
                yield value[index].reshape(-1, value.shape[-1]), _of_expert(seen, index)
        else:
            yield value.reshape(-1, value.shape[-1]), seen

    def _inputs_first(self, path: Path) -> bool:
        return self.layer.specs[path].inputs == 0

    def _multiply(self, path: Path, scale: Vector, expert: int | None = None) -> None:
        """Multiply the columns of a weight by ``scale``, and divide the statistics of its inputs by it."""
        value = self.layer.values[path] if expert is None else self.layer.values[path][expert]
        value *= scale.reshape(-1, *(1,) * (value.ndim - 1)) if self._inputs_first(path) else scale
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
    return np.asarray(seen.total / np.maximum(seen.rows, 1.0))
