"""GPU engines to compare: each runs in a process that answers requests of `benchmarks.peers.protocol`."""
