"""``python stand_in.py --section NAME ...``: a section's process, with steps that hang, crash or poison the device.

The environment sets the behaviour of each step, as JSON: {step: behaviour}.
"""

import concurrent.futures
import json
import os
import signal
import sys
import tempfile
import time

import jax
import jax.numpy as jnp

from jaxinfer.gpu_check import __main__ as gpu_check
from jaxinfer.gpu_check.sections import Section

HANG = jax.jit(lambda x: jax.lax.while_loop(lambda x: x >= 0, lambda x: (x + 1) & 255, x))


def run(report):
    steps = json.loads(os.environ["STAND_IN_STEPS"])
    at_once = 1 if report.alone else int(os.environ.get("STAND_IN_THREADS", "1"))
    with concurrent.futures.ThreadPoolExecutor(at_once) as threads:
        list(threads.map(lambda step: take(report, *step), steps.items()))


def take(report, step, what):
    if not report.time_for(step, 0.5):
        return
    with report.attempt(step):
        match what:
            case "hangs":
                HANG(jnp.int32(0)).block_until_ready()
            case "kills itself":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "poisons":
                report._answers = lambda: False
                raise jax.errors.JaxRuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
            case "fails":
                raise RuntimeError("no room")
            case "goes on":
                for part in range(8):
                    time.sleep(1)
                    report.goes_on(f"part {part}")
            case seconds:
                time.sleep(seconds)
        report.put(step, ok=True, process=os.getpid(), alone=report.alone, temporary=tempfile.gettempdir())


if __name__ == "__main__":
    sys.modules["jaxinfer.gpu_check.stand_in"] = sys.modules[__name__]
    gpu_check.BY_NAME["copy"] = Section("copy", "jaxinfer.gpu_check.stand_in", 60)
    sys.exit(gpu_check.main(sys.argv[1:]))
