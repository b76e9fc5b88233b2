"""The PyTorch peer: SDPA as transformers calls it, keys padded to the longest sequence, KV heads repeated, a mask."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.attention.shapes import LAYERS, Shape, serve


def prepare(shape: Shape, dtype: str) -> Callable[[], Any]:
    torch.manual_seed(0)
    rows, longest, kind = len(shape.lengths), max(shape.lengths), getattr(torch, dtype)
    q = torch.randn(rows, shape.heads, shape.queries, shape.head_dim).to(kind)
    keys, values = (torch.randn(rows, shape.kv_heads, longest, shape.head_dim).to(kind) for _ in range(2))
    mask = _mask(shape, longest)
    grouped = shape.heads != shape.kv_heads
    causal = mask is None and shape.queries > 1

    @torch.inference_mode()
    def call() -> torch.Tensor:
        mixed, attend = q, torch.nn.functional.scaled_dot_product_attention
        for _ in range(LAYERS):
            mixed = attend(mixed, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
        return mixed

    return call


def _mask(shape: Shape, longest: int) -> torch.Tensor | None:
    """Return the mask, or None where transformers passes none: equal lengths, and one query or full causal."""
    if min(shape.lengths) == longest and shape.queries in (1, longest):
        return None
    begin = longest - torch.tensor(shape.lengths)[:, None, None]  # padded on the left
    at, query = torch.arange(longest), longest - shape.queries + torch.arange(shape.queries)[:, None]
    return ((at >= begin) & (at <= query))[:, None]


if __name__ == "__main__":
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    serve({"torch": torch.__version__}, prepare)
