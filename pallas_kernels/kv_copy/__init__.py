"""kv_copy: pages and rows of a layer's pool to other places of it, and to and from staging buffers."""

from pallas_kernels.kv_copy.api import copy_pages, explain, gather_pages, move_rows, scatter_pages

__all__ = ["copy_pages", "explain", "gather_pages", "move_rows", "scatter_pages"]
