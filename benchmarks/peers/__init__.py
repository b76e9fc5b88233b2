"""Other engines compared with jaxinfer, each in a process of its own: see docs/benchmarks.md.

`protocol`, `checkpoint` and the programs of the peers also run in the oracle's Python, which is 3.11 and has no jax.
"""
