"""token_index: the sparse indexer of DeepSeek-V3.2, which chooses the tokens that a query attends to."""

from pallas_kernels.token_index.reference import Index, scores, top_keys
from pallas_kernels.token_index.xla import decode, prefill

__all__ = ["Index", "decode", "prefill", "scores", "top_keys"]
