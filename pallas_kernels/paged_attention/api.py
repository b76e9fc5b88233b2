"""The doors of paged attention. Every platform takes the XLA path until a kernel has been measured to beat it."""

from pallas_kernels.paged_attention.xla import decode, prefill

__all__ = ["decode", "prefill"]
