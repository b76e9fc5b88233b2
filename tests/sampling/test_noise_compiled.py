"""Compiled for an H100, the noise of a draw never reaches memory."""

import math
import re
import subprocess
import sys

import pytest

from pallas_kernels.check.plugins import default_folder, environment
from tests.gpu_plugins import needs_plugins
from tools.check_programs.hlo import read_module

ROWS, BLOCKS = 8, 1002
# Run in a child process, whose JAX has the plugin.
COMPILE = f"""
import jax, numpy as np
from jaxinfer.sampling.select import draw
from pallas_kernels.check.target import DEVICES
from tests.sampling.reference import neutral
target = DEVICES["h100"]
some = np.zeros({ROWS}, np.int32)
given = np.zeros(({ROWS}, {BLOCKS}, 128), np.float32), neutral({ROWS}), some, some == 0, some
given = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=target.sharding), given)
with target.current():
    print(jax.jit(draw).lower(*given).compile().as_text())
"""


@pytest.mark.slow
@needs_plugins
def test_noise_is_made_in_the_reduction() -> None:
    made = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment(default_folder()), capture_output=True, text=True, check=True
    )
    module = read_module(made.stdout)
    large = [
        one
        for one in module.in_memory()
        if one.opcode not in ("parameter", "bitcast", "get-tuple-element")
        and any(math.prod(map(int, dims.split(","))) >= ROWS * BLOCKS * 128 for dims in _results(one.line))
    ]
    assert "log-plus-one" in made.stdout
    assert large == []


def _results(line: str) -> list[str]:
    """Return the dimensions of an instruction's results."""
    return re.findall(r"\[(\d[\d,]*)\]", line.partition(" = ")[2].partition("(%")[0])
