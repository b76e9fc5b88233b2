"""mla_attention: attention over paged latents (multi-head latent attention, absorbed form)."""

from pallas_kernels.mla_attention.api import decode, explain, extend, prefill
from pallas_kernels.mla_attention.options import LatentOptions

__all__ = ["LatentOptions", "decode", "explain", "extend", "prefill"]
