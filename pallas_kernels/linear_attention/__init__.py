"""linear_attention: a fixed-size state instead of keys and values: gated linear attention and the gated delta rule."""

from pallas_kernels.linear_attention.api import chunks, step

__all__ = ["chunks", "step"]
