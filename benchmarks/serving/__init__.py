"""Load and latency of a whole server: its front end, over an engine whose tokens come on time."""
