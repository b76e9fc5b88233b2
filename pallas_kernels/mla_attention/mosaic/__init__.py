"""Mosaic GPU kernels of MLA: `attention` (decode, extend, prefill) and the merge of the splits of decode."""
