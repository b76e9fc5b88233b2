"""Continuous batching engine: takes token-id requests and returns output deltas, one step at a time."""
