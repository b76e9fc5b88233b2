"""Storages of weights: arrays, `Quantized`, `Split`. A forward pass reads a weight through the functions here alone."""

from jaxinfer.quant.adapted import Adapted
from jaxinfer.quant.dispatch import (
    grouped_matmul,
    grouped_path,
    matmul,
    matmul_heads,
    matmul_transposed,
    plus_bias,
    take,
)
from jaxinfer.quant.storage import (
    Quantized,
    Split,
    dense,
    for_kernels,
    is_stored,
    partition,
    rounds_activations,
    with_activations,
    with_values,
)

__all__ = [
    "Adapted",
    "Quantized",
    "Split",
    "dense",
    "for_kernels",
    "grouped_matmul",
    "grouped_path",
    "is_stored",
    "matmul",
    "matmul_heads",
    "matmul_transposed",
    "partition",
    "plus_bias",
    "rounds_activations",
    "take",
    "with_activations",
    "with_values",
]
