"""Activations quantised to 8 bits on several devices: each token has the same scale as on one device."""

import pathlib

import pytest

from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.quant.layouts import Grouped
from tests.parallel.devices.test_tensor import model_of, same_logits
from tests.quant.models import stored_and_plain

FP8 = "float8_e4m3fn"


@pytest.mark.parametrize(
    ("name", "mesh"), [("groups", (2, 1)), pytest.param("experts", (2, 2), marks=pytest.mark.slow)]
)
def test_one_scale_for_a_token(name: str, mesh: tuple[int, int], tmp_path: pathlib.Path) -> None:
    def choose(name: str, inputs: int) -> Grouped:
        del name
        return Grouped(FP8, inputs, activations=FP8)

    model = stored_and_plain(model_of(name, intermediate_size=64), tmp_path, choose)[0]
    same_logits(model, make_mesh(mesh[0], expert=mesh[1]))
