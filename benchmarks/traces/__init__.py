"""Recorded workloads: reading and serving them, and the bounds of an ideal server."""
