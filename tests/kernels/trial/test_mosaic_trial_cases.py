"""The interpreted kernels pass their trials: the operands and bounds of the trials fit each kernel."""

import functools

import pytest

from pallas_kernels import compat
from pallas_kernels.trial.program import checking
from tests.kernels.trial.launches import LAUNCHES

SLOW = {"prefill", "latents of chunks", "states of chunks", "experts", "experts of int4", "product of MXFP4"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LAUNCHES]
)
def test_the_kernel_passes(name):
    launch = LAUNCHES[name]()
    interpreted = launch._replace(kernel=functools.partial(launch.kernel, interpret=compat.interpret_params()))
    assert compat.interpreted(lambda: checking(interpreted)(0)) <= 0.7
