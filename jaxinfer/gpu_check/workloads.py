"""Shapes at which kernels and peers are timed: layers of Llama-3.1-8B, DeepSeek-V2 and others."""

from __future__ import annotations

from typing import Any

from pallas_kernels.grouped_matmul.arg_specs import Mixture
from pallas_kernels.kv_copy.arg_specs import Copy
from pallas_kernels.kv_write.arg_specs import Write
from pallas_kernels.linear_attention.arg_specs import QWEN, Layer, States
from pallas_kernels.matmul.arg_specs import Product as Dense
from pallas_kernels.mla_attention.arg_specs import Latents
from pallas_kernels.paged_attention.arg_specs import Decode as Decode
from pallas_kernels.paged_attention.arg_specs import Prefill as Prefill
from pallas_kernels.quant_matmul.arg_specs import Product, StoredMixture

L2_BYTES = 50_000_000  # L2 cache of an H100; an H200 has the same
Workload = Decode | Prefill | Latents | Product | Dense | Mixture | Write | Copy | States

# The most informative first: those that the time does not suffice for are skipped from the end.
DECODES = (
    Decode(rows=64, context=4096),
    Decode(rows=64, context=2048),
    Decode(rows=64, context=4096, page=16),
    Decode(rows=8, context=4096),
    Decode(rows=1, context=4096),
    Decode(rows=256, context=512),
    Decode(rows=64, context=512),
)
PREFILLS = (
    Prefill(sequences=1, chunk=8192, context=8192),
    Prefill(sequences=4, chunk=2048, context=2048),
    Prefill(sequences=1, chunk=2048, context=8192),
)
# QKV projection, gate with up, down, and LM head of Llama-3.1-8B (in another order).
FEW_ROWS = (Dense(64, 14336, 4096), Dense(64, 4096, 14336, last=1, gated=1), Dense(1), Dense(8, 4096, 128256, last=1))
MANY_ROWS = (Dense(2048, 4096, 14336, last=1, gated=1), Dense(2048), Dense(8192, 14336, 4096))
# Shapes with a goal whose weights are not dense: int4 with few rows and many, experts, latents.
STORED, PREFILLED = Product(16, 28672), Product(2048, 28672)
EXPERTS, FLOAT4 = Mixture(64, 8, 2, 28672, 4096), StoredMixture(64, 32, 4, 5760, 2880)
LATENTS = Latents()
OTHERS: tuple[Workload, ...] = (
    STORED,
    *FEW_ROWS[:2],
    *MANY_ROWS[:1],
    LATENTS,
    EXPERTS,
    FLOAT4,
    PREFILLED,
    Product(1, 28672),
    Latents(heads=16),
    Write("", 64, 1),
    Write("", 1, 2048),
    Copy(64),
    States(QWEN, 64),
    States(QWEN, 1, 2048),
    Product(64, 28672),
    Product(16, 28672, weights="int8"),
    StoredMixture(1, 32, 4, 5760, 2880),
    StoredMixture(2048, 32, 4, 5760, 2880),
    Mixture(1, 8, 2, 28672, 4096),
    Mixture(64, 128, 8, 1536, 2048),
    Mixture(512, 8, 2, 28672, 4096),
    *FEW_ROWS[2:],
    *MANY_ROWS[1:],
)
_QUICK: dict[str, Any] = {"group": 2, "kv_heads": 2, "head_dim": 64}
_TINY = Layer("tiny", 1, 2, 64, 32, True)
QUICK_DECODES = (Decode(rows=2, context=128, **_QUICK),)
QUICK_PREFILLS = tuple(Prefill(chunk=64, context=context, **_QUICK) for context in (64, 128))
QUICK_OTHERS: tuple[Workload, ...] = (
    Product(2, 128, 256),
    Latents(sequences=2, context=128, heads=4),
    Mixture(2, 4, 2, 128, 64),
    StoredMixture(2, 4, 2, 128, 64),
    Write("", 2, 1, kv_heads=2, head_dim=64),
    Copy(2, kv_heads=2, head_dim=64),
    States(_TINY, 2),
    States(_TINY, 1, 64),
    Dense(3, 64, 32, last=1, gated=1),
)


def attention(*, quick: bool) -> tuple[Decode | Prefill, ...]:
    """Return the shapes that peers are timed at, too; the longest decode and prefill first."""
    decodes, prefills = (QUICK_DECODES, QUICK_PREFILLS) if quick else (DECODES, PREFILLS)
    return (*decodes[:1], *prefills[:1], *decodes[1:], *prefills[1:])


def others(*, quick: bool) -> tuple[Workload, ...]:
    """Return the shapes that have no peer here."""
    return QUICK_OTHERS if quick else OTHERS


def variants(moved: int) -> int:
    """Return how many operand sets make every call read from memory: four times the L2 cache, at most 16 sets."""
    return max(1, min(16, -(-4 * L2_BYTES // moved)))
