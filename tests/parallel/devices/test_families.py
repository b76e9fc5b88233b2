"""Families whose layers differ from Llama's: more devices than KV heads, quantised weights and adapters."""

import pathlib
from typing import Any

import pytest

from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.quant.layouts import Grouped
from tests.models.parity import load_case
from tests.models.test_parity import golden
from tests.parallel.devices.test_tensor import same_logits
from tests.quant.models import stored_and_plain

# Norms over all heads, of each head, behind the rotation, and without weights.
NORMS = (
    *("minimax_m2-hub", "olmo2-hub", "cohere-hub", "stablelm-parallel", "hunyuan_v1_dense-alpha-hub"),
    "llama4_text-hub",
)
# Side by side, with norms behind, and with factors.
BLOCKS = ("gpt_neox-hub", "cohere2-hub", "glm4-hub", "exaone4-hub", "starcoder2-hub", "ernie4_5-hub", "granite-biases")
EXPERTS = ("minimax_m2-hub", "olmoe-hub", "phimoe-hub")


def cases(*names: str, fast: str = "") -> list[Any]:
    """Each once; all but one are the slow tier's."""
    return [pytest.param(name, marks=() if name == fast else pytest.mark.slow) for name in dict.fromkeys(names)]


def load(name: str, folder: pathlib.Path) -> Model:
    return load_case(golden(name), folder)


@pytest.mark.parametrize("name", cases(*NORMS, fast="minimax_m2-hub"))
def test_norms_of_heads_that_are_copied(name: str, tmp_path: pathlib.Path):
    """Over four devices: each of two KV heads lies on two of them."""
    same_logits(load(name, tmp_path), make_mesh(4))


@pytest.mark.parametrize("name", cases(*NORMS[:-1], *BLOCKS, *EXPERTS, fast="cohere-hub"))
def test_quantised_weights(name: str, tmp_path: pathlib.Path):
    model = load(name, tmp_path / "plain")
    stored, _ = stored_and_plain(model, tmp_path / "stored", lambda name, inputs: Grouped("float8_e4m3fn", 4))
    same_logits(stored, make_mesh(2, expert=2) if name in EXPERTS else make_mesh(2))
