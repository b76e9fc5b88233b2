"""Continuous batching: requests of token ids in, deltas out, one step at a time."""
