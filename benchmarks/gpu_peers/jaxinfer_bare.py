"""Start `jaxinfer_peer` where JAX, Flax and numpy may be the only packages (`jaxinfer.gpu_check.standins`)."""

from __future__ import annotations

import runpy

from jaxinfer.gpu_check import standins

if __name__ == "__main__":
    standins.provide()
    runpy.run_module("benchmarks.gpu_peers.jaxinfer_peer", run_name="__main__")
