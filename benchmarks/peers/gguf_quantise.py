"""Quantisation of a GGUF by llama.cpp: ``python -m benchmarks.peers.gguf_quantise FROM TO KIND``.

Runs in the oracle's Python. KIND is a name of llama.cpp's file types: Q8_0, Q4_K_M, ...
"""

from __future__ import annotations

import pathlib
import sys

import llama_cpp


def quantize(source: pathlib.Path, target: pathlib.Path, kind: str) -> None:
    """Quantise ``source`` to ``target``.

    Raises:
        RuntimeError: llama.cpp failed.
    """
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    unfinished = target.with_suffix(".tmp")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(unfinished).encode(), params):
        raise RuntimeError(f"llama.cpp could not quantise {source} as {kind}")
    unfinished.replace(target)


if __name__ == "__main__":
    quantize(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3])
