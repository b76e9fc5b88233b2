"""Paged KV cache: page tables and reference counts on the host, page pools on the device."""
