"""``python -m jaxinfer.gpu_check.start CACHE [--quick]``: seconds of an engine start, as a line of JSON.

The model has the 8B shape and random weights, as in section engine; ``CACHE``: the compilation cache folder.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from jaxinfer.compilations import use_compilation_cache
from jaxinfer.gpu_check.llama import LLAMA_8B, TINY, random_model
from jaxinfer.gpu_check.throughput import LOADS, QUICK_LOADS, planned, settings


def main(arguments: Sequence[str]) -> None:
    cache, *quick = arguments
    use_compilation_cache(cache)
    model = random_model(TINY if quick else LLAMA_8B)
    begun = time.perf_counter()
    planned(model, settings(QUICK_LOADS if quick else LOADS))
    print(json.dumps({"seconds_to_start": round(time.perf_counter() - begun, 2)}))


if __name__ == "__main__":
    main(sys.argv[1:])
