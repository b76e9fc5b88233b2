"""``python tune_stand_in.py --journal ... --out ...``: a tuner process whose candidates hang or crash.

The environment sets the behaviour of candidates, as JSON: {"rows of the shape, keys, stages": behaviour}.
"""

import json
import os
import pathlib
import signal
import sys
import time

import jax
import jax.numpy as jnp

from pallas_kernels.choice import HOPPER, Target
from pallas_kernels.tune import __main__ as door
from tests.kernels.test_tune import TASKS, TIMES

HANG = jax.jit(lambda x: jax.lax.while_loop(lambda x: x >= 0, lambda x: (x + 1) & 255, x))
PLAN = json.loads(os.environ["STAND_IN_PLAN"])


class Bench:
    def __init__(self, problem, bits):
        self.rows = problem.key.sizes["rows"]
        self._do("operands")

    def prepare(self, tiles):
        what = f"{tiles.keys}, {tiles.stages}"
        self._do(what)
        return "it does not run: no" if PLAN.get(f"{self.rows}, {what}") == "is refused" else None

    def sample(self, tiles):
        self._do(f"sample {tiles.keys}, {tiles.stages}")
        return TIMES[tiles]

    def _do(self, what):
        name = f"{self.rows}, {what}"
        with pathlib.Path(os.environ["STAND_IN_LOG"]).open("a") as log:
            log.write(f"{name}\n")
        match PLAN.get(name):
            case "hangs":
                HANG(jnp.int32(0)).block_until_ready()
            case "kills itself":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "is slow":
                time.sleep(3600)


if __name__ == "__main__":
    door.lowering_target = lambda: Target("gpu", HOPPER, "H100")
    sys.exit(door.tune(door._parser().parse_args(), TASKS[:2], Bench))
