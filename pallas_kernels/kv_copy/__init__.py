"""kv_copy: copies of pages and rows within a layer's pool, and to and from staging buffers."""

from pallas_kernels.kv_copy.api import copy_pages, explain, gather_pages, move_rows, scatter_pages

__all__ = ["copy_pages", "explain", "gather_pages", "move_rows", "scatter_pages"]
