"""linear_attention: gated linear attention and the gated delta rule, with a fixed-size state instead of a KV cache."""

from pallas_kernels.linear_attention.api import SIZE, chunks, decode, explain, prefill, step

__all__ = ["SIZE", "chunks", "decode", "explain", "prefill", "step"]
