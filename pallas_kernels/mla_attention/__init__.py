"""mla_attention: attention over paged latents (multi-head latent attention, absorbed form)."""

from pallas_kernels.mla_attention.api import decode, explain, extend, prefill

__all__ = ["decode", "explain", "extend", "prefill"]
