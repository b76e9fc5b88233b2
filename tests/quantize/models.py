"""Small random models as folders, and calibration samples for them."""

import pathlib

import numpy as np

from jaxinfer.quantize import Calibration
from tests.models.parity import load_case
from tools.oracle.golden import load

GOLDENS = pathlib.Path(__file__).resolve().parents[1] / "goldens" / "models"


def folder_of(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Write the folder of a golden case: config.json, float32 weights, a tokenizer of 64 words."""
    load_case(load(GOLDENS / name), folder)
    return folder


def samples(count: int = 6, length: int = 40, seed: int = 0) -> Calibration:
    return Calibration(np.random.default_rng(seed).integers(0, 64, (count, length)).astype(np.int32), batch=4)
