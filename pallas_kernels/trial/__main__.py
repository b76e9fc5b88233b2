"""``python -m pallas_kernels.trial PLATFORM FOLDER JOBS NAME...``: run programs of a folder in turn, each once.

Lines of standard output announce the next action and its program: the parent finds a process that hangs or dies and
replaces it (`pallas_kernels.trial.run`). An error while a program runs ends the process: after it no result of the GPU
can be trusted. ``JOBS`` threads compile ahead.
"""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as mosaic_gpu  # registers the custom call that runs its kernels
from jax.export import deserialize


def main(argv: Sequence[str] | None = None) -> int:
    platform, folder, jobs, *names = sys.argv[1:] if argv is None else argv
    if jax.default_backend() != platform:
        print(f"JAX runs on {jax.default_backend()} here, the programs are for {platform}", file=sys.stderr)
        return 1
    _say("started", "")
    with concurrent.futures.ThreadPoolExecutor(int(jobs)) as threads:
        compiled = {name: threads.submit(_compiled, pathlib.Path(folder, name)) for name in names}
        for name in names:
            _say("compiling", name)
            try:
                program = compiled[name].result()
            except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as problem:
                _say("refused", name, why=str(problem)[:2000])
                continue
            _say("running", name)
            try:
                _say("done", name, error=float(program(np.uint32(0))))
            except jax.errors.JaxRuntimeError as problem:
                _say("failed", name, why=str(problem)[:2000])
                threads.shutdown(wait=False, cancel_futures=True)
                return 1
    return 0


def _compiled(path: pathlib.Path) -> Callable[..., Any]:
    program = deserialize(bytearray(path.read_bytes()))
    compiled: Callable[..., Any] = jax.jit(program.call).lower(jax.ShapeDtypeStruct((), np.uint32)).compile()
    return compiled


def _say(state: str, name: str, **more: Any) -> None:
    print(json.dumps({"state": state, "name": name, **more}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
