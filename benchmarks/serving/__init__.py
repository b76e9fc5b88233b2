"""Load and latency of a whole server: its front end, over an engine that emits tokens on schedule."""
