"""``python -m benchmarks.gpu.start CACHE [--quick]``: seconds of an engine start, as a line of JSON.

The model has the 8B shape and random weights, as in section engine; ``CACHE``: the compilation cache folder.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

import jax

from benchmarks.gpu.throughput import LOADS, QUICK_LOADS, settings
from jaxinfer.compilations import use_compilation_cache
from jaxinfer.engine.distributed.make import make_engine
from jaxinfer.gpu_check.llama import LLAMA_8B, TINY, random_model


def main(arguments: Sequence[str]) -> None:
    cache, *quick = arguments
    use_compilation_cache(cache)
    model = random_model(TINY if quick else LLAMA_8B)
    begun = time.perf_counter()
    make_engine(model, settings(QUICK_LOADS if quick else LOADS), jax.default_backend())
    print(json.dumps({"seconds_to_start": round(time.perf_counter() - begun, 2)}))


if __name__ == "__main__":
    main(sys.argv[1:])
