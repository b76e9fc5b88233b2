"""linear_attention: a fixed-size state instead of keys and values: gated linear attention and the gated delta rule."""

from pallas_kernels.linear_attention.api import SIZE, chunks, decode, explain, prefill, step

__all__ = ["SIZE", "chunks", "decode", "explain", "prefill", "step"]
