"""Benchmarks: each module is a command of its own; the published figures are in results/."""
