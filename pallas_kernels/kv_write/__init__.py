"""kv_write: new keys and values into the pages of a sequence."""

from pallas_kernels.kv_write.xla import write_pages, write_rows

__all__ = ["write_pages", "write_rows"]
