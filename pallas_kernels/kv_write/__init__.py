"""kv_write: writes of new keys and values into the pages of a sequence."""

from pallas_kernels.kv_write.api import (
    explain,
    explain_projected,
    write,
    write_latents,
    write_pages,
    write_projected,
    write_rows,
    write_scaled_latents,
)
from pallas_kernels.kv_write.reference import Written, static_scales

__all__ = [
    "Written",
    "explain",
    "explain_projected",
    "static_scales",
    "write",
    "write_latents",
    "write_pages",
    "write_projected",
    "write_rows",
    "write_scaled_latents",
]
