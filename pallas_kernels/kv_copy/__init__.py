"""kv_copy: pages of a layer's pool to other pages of it."""

from pallas_kernels.kv_copy.xla import copy_pages

__all__ = ["copy_pages"]
