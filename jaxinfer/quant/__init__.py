"""Storages of weights. A plain array is the only one so far; every read of a weight goes through `matmul` or `take`."""

from jaxinfer.quant.dispatch import grouped_matmul, matmul, matmul_heads, matmul_transposed, take

__all__ = ["grouped_matmul", "matmul", "matmul_heads", "matmul_transposed", "take"]
