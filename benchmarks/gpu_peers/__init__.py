"""Engines of a GPU side by side: each is a process that answers requests of `benchmarks.peers.protocol`."""
