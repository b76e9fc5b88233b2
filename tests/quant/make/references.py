"""Equations of the papers in float64 numpy, one weight and one input at a time."""

import dataclasses

import numpy as np

from jaxinfer.quant.make import IntegerGrid


def correlated(rows: int, inputs: int, seed: int) -> np.ndarray:
    """Return inputs [rows, inputs] of low rank plus noise, some of them ten times as large."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, inputs // 4)) @ rng.normal(size=(inputs // 4, inputs)) + rng.normal(size=(rows, inputs))
    return x * np.where(rng.random(inputs) < 0.05, 10.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Steps:
    """`IntegerGrid` in float64, with its scales rounded to ``scale_dtype``."""

    grid: IntegerGrid

    def fit(self, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        steps = 2**self.grid.bits - 1
        if self.grid.symmetric:
            scale = 2 * np.abs(weight).max(-1) / steps
        else:
            high, low = np.maximum(weight.max(-1), 0), np.minimum(weight.min(-1), 0)
            scale = (high - low) / steps
        scale = np.where(scale > 0, scale, 1.0).astype(np.dtype(self.grid.scale_dtype)).astype(np.float64)
        if self.grid.symmetric:
            return scale, np.zeros_like(scale)
        return scale, np.clip(np.round(-low / scale), 0, steps) - 2 ** (self.grid.bits - 1)

    def code(self, weight: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
        half = 2 ** (self.grid.bits - 1)
        return np.clip(np.round(weight / scale) + zero, -half, half - 1)


@dataclasses.dataclass(frozen=True)
class Paper:
    """The result of GPTQ for a weight [out, in], columns in the order of the inputs.

    Attributes:
        margins: distance, in quantisation steps, of each weight from the boundary of two codes when it was rounded.
        order: order in which inputs were quantised.
    """

    values: np.ndarray
    codes: np.ndarray
    margins: np.ndarray
    order: np.ndarray

    def differing(self, codes: np.ndarray) -> np.ndarray:
        """Return, for each row with different codes, the margin of the first of them: the later ones follow from it."""
        differs = (codes != self.codes)[:, self.order]
        rows = np.flatnonzero(differs.any(1))
        return self.margins[:, self.order][rows, differs[rows].argmax(1)]


def optimal_brain(
    weight: np.ndarray, gram: np.ndarray, grid: IntegerGrid, damp: float, act_order: bool, static: bool
) -> Paper:
    """GPTQ by equations 2 and 3 of Frantar et al. 2022, the inverse updated after each input by elimination."""
    steps, inputs = Steps(grid), weight.shape[1]
    group = grid.group or inputs
    diagonal = np.diag(gram).copy()
    order = np.argsort(-diagonal, kind="stable") if act_order else np.arange(inputs)
    gram = gram + np.diag(diagonal == 0)
    gram = gram[order][:, order]
    inverse = np.linalg.inv(gram + damp * np.diag(gram).mean() * np.eye(inputs))
    work, values, codes, margins = weight[:, order].copy(), *(np.zeros_like(weight) for _ in range(3))
    fixed = [steps.fit(weight[:, i : i + group]) for i in range(0, inputs, group)]
    for j in range(inputs):
        if static:
            scale, zero = fixed[order[j] // group]
        elif j % group == 0:
            scale, zero = steps.fit(work[:, j : j + group])
        codes[:, order[j]] = code = steps.code(work[:, j], scale, zero)
        margins[:, order[j]] = np.abs(work[:, j] / scale % 1 - 0.5)
        values[:, order[j]] = value = (code - zero) * scale
        error = (work[:, j] - value) / inverse[j, j]
        work -= np.outer(error, inverse[j])
        inverse = inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return Paper(values, codes, margins, order)


def output_error(weight: np.ndarray, values: np.ndarray, x: np.ndarray) -> float:
    """Return ||x W^T - x Q^T||^2 / ||x W^T||^2."""
    return float(((x @ (weight - values).T) ** 2).sum() / ((x @ weight.T) ** 2).sum())
