"""Families whose layers differ from Llama: more devices than KV heads, quantised weights and adapters."""

import pathlib
from typing import Any

import pytest

from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.quant.layouts import Grouped
from tests.fakes import random_model
from tests.models.parity import load_case
from tests.models.test_parity import golden
from tests.parallel.devices.test_tensor import same_logits
from tests.quant.models import stored_and_plain

# QK norms over all heads, per head, after the rotary embedding, and without weights.
NORMS = (
    *("minimax_m2-hub", "olmo2-hub", "cohere-hub", "stablelm-parallel", "hunyuan_v1_dense-alpha-hub"),
    "llama4_text-hub",
)
# Parallel attention and MLP, norms after blocks, and multipliers.
BLOCKS = ("gpt_neox-hub", "cohere2-hub", "glm4-hub", "exaone4-hub", "starcoder2-hub", "ernie4_5-hub", "granite-biases")
EXPERTS = ("minimax_m2-hub", "olmoe-hub", "phimoe-hub")

# Sizes wide enough for groups of inputs on four devices.
WIDER: dict[str, dict[str, int]] = {
    "glm4_moe-hub": {"moe_intermediate_size": 32},
    "llama4_text-hub": {"intermediate_size": 32, "intermediate_size_mlp": 64},
    "ernie4_5_moe-hub": {"moe_intermediate_size": 32},
    "qwen2_moe-hub": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}


def cases(*names: str, fast: str = "") -> list[Any]:
    """Return each name once as a parameter; all except ``fast`` are slow."""
    return [pytest.param(name, marks=() if name == fast else pytest.mark.slow) for name in dict.fromkeys(names)]


def load(name: str, folder: pathlib.Path) -> Model:
    return load_case(golden(name), folder)


@pytest.mark.parametrize("name", cases(*NORMS, fast="minimax_m2-hub"))
def test_norms_of_heads_that_are_copied(name: str, tmp_path: pathlib.Path):
    """On four devices, each of two KV heads has two copies."""
    same_logits(load(name, tmp_path), make_mesh(4))


@pytest.mark.parametrize("name", cases(*NORMS[:-1], *BLOCKS, *EXPERTS, fast="cohere-hub"))
def test_quantised_weights(name: str, tmp_path: pathlib.Path):
    model = load(name, tmp_path / "plain")
    stored, _ = stored_and_plain(model, tmp_path / "stored", lambda name, inputs: Grouped("float8_e4m3fn", 4))
    same_logits(stored, make_mesh(2, expert=2) if name in EXPERTS else make_mesh(2))


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDER)
def test_quantised_experts_beside_a_shared_one(name: str, tmp_path: pathlib.Path):
    config = {**golden(name).config, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, **WIDER[name]}
    model = random_model(**config)
    stored, _ = stored_and_plain(model, tmp_path, lambda name, inputs: Grouped("float8_e4m3fn", 4))
    same_logits(stored, make_mesh(2, expert=2))
