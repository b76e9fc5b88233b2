"""A model that is quantised while it is loaded is the same on any mesh."""

import pathlib

import jax
import numpy as np
import pytest

from jaxinfer.engine.execution.placement import with_copied_heads
from jaxinfer.loading import load_model
from jaxinfer.parallel.mesh import make_mesh
from tests.quantize.models import folder_of
from tests.quantize.test_on_load import settings

MESHES = {
    "TP 2": ("qwen2-bias", "int8", {"tensor": 2}),
    "stages": ("qwen2-bias", "w8a8", {"tensor": 2, "stage": 2}),
    "replicas": ("qwen2-bias", "nf4", {"data": 2}),
    "experts": ("qwen2_moe-hub", "int8", {"expert": 2}),
    "more devices than KV heads": ("qwen2-bias", "fp8", {"tensor": 4}),
    "calibrated": ("qwen2-bias", "gptq", {"tensor": 2}),
}


@pytest.mark.parametrize("name", MESHES)
def test_it_is_that_of_one_device(name: str, tmp_path: pathlib.Path) -> None:
    source, method, sizes = MESHES[name]
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{word}" for word in np.random.default_rng(0).integers(0, 64, 400)))
    folder, asked = folder_of(source, tmp_path / "source"), settings(method, text)
    mesh = make_mesh(**sizes)
    expected = with_copied_heads(load_model(str(folder), quantization=asked, show_progress=False), mesh).params
    found = load_model(str(folder), quantization=asked, mesh=mesh, show_progress=False).params
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, own), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert np.asarray(own).tobytes() == np.asarray(other).tobytes(), path
    assert any(len(leaf.devices()) > 1 for leaf in jax.tree.leaves(found))
