"""Weight storages: arrays, `Quantized`, `Split`. A forward pass reads weights only through the functions here."""

from jaxinfer.quant.dispatch import (
    grouped_matmul,
    grouped_path,
    matmul,
    matmul_heads,
    matmul_transposed,
    plus_bias,
    swiglu,
    take,
)
from jaxinfer.quant.gemm_selftest import KernelLost, gemm_fault, refused_products
from jaxinfer.quant.kernel_form import for_kernels
from jaxinfer.quant.lora_weight import LoRAWeight
from jaxinfer.quant.storage import (
    Quantized,
    Split,
    dense,
    is_stored,
    partition,
    rounds_activations,
    with_activations,
    with_values,
)
from jaxinfer.quant.unquantized import Unquantized, for_gemm, gemm_refusal, laid_out, layout_for_cpu

__all__ = [
    "KernelLost",
    "LoRAWeight",
    "Quantized",
    "Split",
    "Unquantized",
    "dense",
    "for_gemm",
    "for_kernels",
    "gemm_fault",
    "gemm_refusal",
    "grouped_matmul",
    "grouped_path",
    "is_stored",
    "laid_out",
    "layout_for_cpu",
    "matmul",
    "matmul_heads",
    "matmul_transposed",
    "partition",
    "plus_bias",
    "refused_products",
    "rounds_activations",
    "swiglu",
    "take",
    "with_activations",
    "with_values",
]
