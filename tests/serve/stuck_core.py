"""`python -m tests.serve.stuck_core FILE`: the real engine core; its decode steps block while FILE exists."""

from __future__ import annotations

import pathlib
import sys
import time
from typing import Any

from jaxinfer.config import EngineConfigError
from jaxinfer.engine.execution.executor import LocalExecutor
from jaxinfer.opening import LOADING_ERRORS
from jaxinfer.parallel.group import GroupError
from jaxinfer.sampling import Sampled
from jaxinfer.serve.core import process
from jaxinfer.serve.core.__main__ import build

_decode = LocalExecutor._decode


def stuck(self: LocalExecutor, *operands: Any) -> Sampled:
    while pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.1)
    return _decode(self, *operands)


if __name__ == "__main__":
    LocalExecutor._decode = stuck  # type: ignore[method-assign]
    process.run(build, (*LOADING_ERRORS, EngineConfigError, GroupError))
