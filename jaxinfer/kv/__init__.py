"""The paged KV cache: pages and tables on the host, pools on the device."""
