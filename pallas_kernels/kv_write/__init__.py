"""kv_write: new keys and values into the pages of a sequence."""

from pallas_kernels.kv_write.api import explain, write, write_latents, write_pages, write_rows, write_scaled_latents
from pallas_kernels.kv_write.reference import Written, static_scales

__all__ = [
    "Written",
    "explain",
    "static_scales",
    "write",
    "write_latents",
    "write_pages",
    "write_rows",
    "write_scaled_latents",
]
