"""Models without checkpoints whose layers are stored quantised."""

import json
import math

import jax
import pytest
from jax.dtypes import itemsize_bits

from jaxinfer.gpu_check.llama import TINY
from jaxinfer.models.model import abstract
from jaxinfer.quant import is_stored
from tools.check_programs.stored import WEIGHTS, dequantized, stored

BITS = {"int8": 8, "int8-activations": 8, "int4": 4, "fp8": 8, "nf4": 4}


def nodes(tree):
    return jax.tree.leaves(tree, is_leaf=is_stored)


@pytest.mark.parametrize("kind", BITS)
def test_every_matrix_of_a_layer_is_stored(kind):
    model = stored(abstract({**TINY, "hidden_size": 128, "intermediate_size": 128}, "bfloat16"), kind)
    found = [node for node in nodes(model.params["layers_1"]) if is_stored(node)]
    assert len(found) == 4
    assert {itemsize_bits(node.arrays["codes"].dtype) for node in found} == {BITS[kind]}
    assert not any(map(is_stored, nodes(model.params["embed"])))


def test_mxfp4_is_of_experts_alone(repo):
    """4 bits per weight plus 8 per 32 weights, as in the checkpoint on the hub."""
    config = json.loads((repo / "configs/models/gpt-oss-20b.json").read_text())
    config = {**config, "num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}
    layer = stored(abstract(config, "bfloat16"), "mxfp4").params["layers_0"]
    experts = [layer["mlp"][name] for name in ("gate_up", "down")]
    assert all(map(is_stored, experts))
    assert sum(map(is_stored, nodes(layer))) == 2
    bits = sum(leaf.size * itemsize_bits(leaf.dtype) for leaf in jax.tree.leaves(experts))
    assert bits == 4.25 * sum(math.prod(node.shape) for node in experts)


def test_what_no_kernel_multiplies_is_made_plain():
    assert {kind for kind in WEIGHTS if dequantized(kind)} == {"nf4"}
