"""Quantisation of weights: pure functions of one weight ``[out, in]`` and statistics of its inputs."""

from jaxinfer.quant.make.gptq import gptq, reconstruction_error
from jaxinfer.quant.make.grid import IntegerGrid, Made
from jaxinfer.quant.make.rtn import MadeCodebook, codebook, float8, integers, mxfp4
from jaxinfer.quant.make.smoothquant import smoothing

__all__ = [
    "IntegerGrid",
    "Made",
    "MadeCodebook",
    "codebook",
    "float8",
    "gptq",
    "integers",
    "mxfp4",
    "reconstruction_error",
    "smoothing",
]
