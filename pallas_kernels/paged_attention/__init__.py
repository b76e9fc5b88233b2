"""paged_attention: queries of many sequences against keys and values in pages."""

from pallas_kernels.paged_attention.api import decode, explain_decode, explain_prefill, prefill
from pallas_kernels.paged_attention.options import AttentionOptions

__all__ = ["AttentionOptions", "decode", "explain_decode", "explain_prefill", "prefill"]
