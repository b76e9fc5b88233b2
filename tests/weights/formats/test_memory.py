"""Host memory for reading a quantised weight: hardly more than the array that is read."""

import pathlib
import tracemalloc

import numpy as np
import pytest

from jaxinfer.weights import open_checkpoint
from jaxinfer.weights.formats import quantized_weights
from tests.weights.formats.checkpoints import save
from tests.weights.test_hostile_folders import FORMATS, module

SIZE = 1024


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "plain"])
def test_a_part_is_made_without_wide_copies(kind: str, tmp_path: pathlib.Path):
    """4-bit codes take a byte each on the host; unpacked as int32 all at once they would take four more."""
    save(tmp_path, module(kind, "model.layers.0.mlp.down_proj", SIZE, SIZE, np.random.default_rng(0)))
    weights, _ = quantized_weights(open_checkpoint(tmp_path), {"quantization_config": FORMATS[kind]})
    (weight,) = weights.values()
    for name in weight.parts:
        tracemalloc.start()
        weight.read(name)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * SIZE * SIZE, name
