"""`python -m tests.serve.stuck_core FILE`: the real engine core; while FILE is there, no decode step ends in it."""

from __future__ import annotations

import pathlib
import sys
import time

from jaxinfer.config import EngineConfigError
from jaxinfer.engine.distributed.group import GroupError
from jaxinfer.engine.execution.executor import Executor
from jaxinfer.engine.execution.step import DecodeBatch
from jaxinfer.loading import LOADING_ERRORS
from jaxinfer.sampling import Sampled
from jaxinfer.serve.core import process
from jaxinfer.serve.core.__main__ import build

_decode = Executor.decode


def stuck(self: Executor, turn: int, batch: DecodeBatch) -> Sampled:
    while pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.1)
    return _decode(self, turn, batch)


if __name__ == "__main__":
    Executor.decode = stuck  # type: ignore[method-assign]
    process.run(build, (*LOADING_ERRORS, EngineConfigError, GroupError))
