"""Quantised weights on several devices are sharded like dense ones, and the model computes the same function."""

import math
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.config import EngineConfigError
from jaxinfer.engine.execution.placement import place_params, shardable_model
from jaxinfer.llm import LLM
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import make_mesh, traced_for
from jaxinfer.quant.layouts import Blocks, Codebook, Grouped, Layout
from jaxinfer.weights.formats import mxfp4
from tests.engine.test_identity import ROOMY, SETTINGS
from tests.parallel.devices.test_tensor import COLLECTIVES, generate, greedy, model_of, same_logits, spread_llm
from tests.quant.examples import LAYOUTS, TABLE
from tests.quant.models import stored_and_plain


def stored(folder: pathlib.Path, layout: Layout, name: str = "groups", **changes: Any) -> Model:
    return stored_and_plain(model_of(name, **changes), folder, lambda name, inputs: layout)[0]


IN_PARTS = {name: layout for name, layout in LAYOUTS.items() if not getattr(layout, "ordered", False)}


FAST = ("int4 with zeros", "ggml")
EACH = [
    pytest.param(layout, id=name, marks=() if name in FAST else pytest.mark.slow) for name, layout in IN_PARTS.items()
]


@pytest.mark.parametrize("layout", EACH)
def test_every_storage_over_two_devices(layout: Layout, tmp_path: pathlib.Path):
    same_logits(stored(tmp_path, layout, intermediate_size=64), make_mesh(2))


@pytest.mark.parametrize(
    "name",
    ["few KV heads", *(pytest.param(name, marks=pytest.mark.slow) for name in ("experts", "odd vocabulary", "biases"))],
)
def test_layouts_of_a_model_over_four_devices(name: str, tmp_path: pathlib.Path):
    mesh = make_mesh(2, expert=2) if name == "experts" else make_mesh(4)
    same_logits(stored(tmp_path, Grouped("int4", 8, zeros=True), name), mesh)


@pytest.mark.slow
def test_the_form_of_kernels_over_two_devices(tmp_path: pathlib.Path):
    same_logits(stored(tmp_path, Grouped("int4", 16, zeros=True)).for_kernels("xla"), make_mesh(2))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(mxfp4.LAYOUT, id="MXFP4"),
        pytest.param(Grouped("int4", 16, zeros=True), id="int4", marks=pytest.mark.slow),
    ],
)
def test_experts_in_the_form_of_kernels_over_four_devices(layout: Layout, tmp_path: pathlib.Path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}

    def choose(name: str, inputs: int) -> Layout | None:
        return layout if "experts" in name else None

    model = stored_and_plain(model_of("experts", **sizes), tmp_path, choose)[0].for_kernels("xla")
    assert model.params["layers_0"]["mlp"]["gate_up"].arrays["scales"].shape[1] == 4  # groups before experts
    same_logits(model, make_mesh(2, expert=2))


def test_columns_in_another_order_over_two_devices(tmp_path: pathlib.Path):
    same_logits(stored(tmp_path, LAYOUTS["int4 in another order"], intermediate_size=64), make_mesh(2))


def test_weights_stored_in_different_ways_over_two_devices(tmp_path: pathlib.Path):
    def choose(name: str, inputs: int) -> Layout | None:
        if "k_proj" in name or "up_proj" in name:
            return None
        return Codebook(TABLE, 16) if "v_proj" in name else Grouped("int4", 16)

    same_logits(stored_and_plain(model_of(), tmp_path, choose)[0], make_mesh(2))


def test_a_device_holds_its_part_alone(tmp_path: pathlib.Path):
    model, mesh = shardable_model(stored(tmp_path, Grouped("int4", 16)), make_mesh(2)), make_mesh(2)
    placed = place_params(model, mesh)["layers_0"]["mlp"]
    for weight, wanted in ((placed["gate_up"], (2, 48, 64)), (placed["down"], (64, 48))):
        shapes = {shard.data.shape for shard in weight.arrays["codes"].addressable_shards}
        assert shapes == {wanted}
        groups = {shard.data.shape for shard in weight.arrays["scales"].addressable_shards}
        assert groups == {(*wanted[:-1], wanted[-1] // 16)}


def test_groups_that_a_border_between_devices_would_cut(tmp_path: pathlib.Path):
    """Half of 96 inputs in groups of 32 are one and a half groups."""
    with pytest.raises(EngineConfigError, match="2 devices do not divide the 3 mlp of layers_0/mlp/down/scales"):
        shardable_model(stored(tmp_path, Grouped("int4", 32)), make_mesh(2))


def of_codebooks(folder: pathlib.Path, kind: str) -> Model:
    """Return a model with block-quantised weights, where the inputs are whole blocks of 256."""
    model = model_of("groups", hidden_size=512, intermediate_size=512)
    return stored_and_plain(model, folder, lambda name, inputs: None if inputs % 256 else Blocks(kind))[0]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in ("IQ2_S", "IQ1_S", "IQ3_XXS")])
def test_blocks_of_codebooks_over_two_devices(kind: str, tmp_path: pathlib.Path):
    model = of_codebooks(tmp_path, kind)
    same_logits(model, make_mesh(2))
    with pytest.raises(EngineConfigError, match=r"4 devices do not divide the 2 \w+ of layers_0/\w+/\w+/blocks"):
        shardable_model(model, make_mesh(4))


def test_nothing_stored_is_gathered(tmp_path: pathlib.Path):
    """No collective of the compiled program moves as much as a device's shard of the smallest weight."""
    mesh = make_mesh(2)
    model = shardable_model(stored(tmp_path, Grouped("int4", 16)), mesh)
    params = place_params(model, mesh)
    with traced_for(mesh):
        text = jax.jit(model.apply).lower(params, jnp.zeros((1, 4), jnp.int32)).compile().as_text()
    kinds = [line for line in text.splitlines() if re.search(COLLECTIVES, line)]
    assert kinds
    forms = [re.search(r"= \w+\[([\d,]*)\]", line) for line in kinds]
    sizes = [math.prod(int(size) for size in form[1].split(",") if size) for form in forms if form]
    assert len(sizes) == len(kinds)
    assert max(sizes) < 64 * 16


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["swapped", "recomputed"])
def test_tokens_of_the_engine_over_two_devices(mode: str, tmp_path: pathlib.Path):
    model = stored(tmp_path, Grouped("int4", 16, zeros=True))
    requests = greedy(20, model)
    want = generate(LLM(model, **SETTINGS, num_pages=ROOMY), requests)
    llm = spread_llm(model, 2, **({"swap_space_gib": 0} if mode == "recomputed" else {}))
    assert generate(llm, requests) == want
    assert generate(llm, requests[::-1])[::-1] == want
    assert llm.engine.stats().prefix_hits > 0
