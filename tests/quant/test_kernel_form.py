"""Stored weights in the layout of GPU kernels are the same weights and give the same products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.quant import dense, for_kernels, grouped_matmul, grouped_path, matmul
from jaxinfer.quant.layouts import Codebook, Grouped
from jaxinfer.types import ParamSpec
from jaxinfer.weights.formats import mxfp4
from pallas_kernels import compat
from pallas_kernels.choice import HOPPER, Target
from pallas_kernels.grouped_matmul import group
from pallas_kernels.grouped_matmul.reference import matmul as grouped_reference
from pallas_kernels.quant_matmul.mosaic import launch
from tests.quant.examples import INPUTS, LAYOUTS, example

WEIGHTS = [pytest.param(layout, id=name) for name, layout in {**LAYOUTS, "MXFP4": mxfp4.LAYOUT}.items()]
MORE_THAN_A_PIECE, STACK, OF_EXPERTS = (3, 100), (5, 2, 20), ("expert", None, "mlp", "embed")
ENTRIES = jnp.asarray([3, 0, 3, 4, 4, 1, 4, 3, 3, 3, 3], jnp.int32)


def inputs(*lead, dtype="float32"):
    return jnp.asarray(np.random.default_rng(1).standard_normal((*lead, INPUTS)), dtype)


@pytest.mark.parametrize("layout", WEIGHTS)
def test_it_is_the_same_weight(layout):
    weight, x = example(layout, MORE_THAN_A_PIECE), inputs(4)
    changed = for_kernels(weight)
    np.testing.assert_array_equal(dense(changed), dense(weight))
    in_groups = isinstance(layout, Grouped) and layout.group < INPUTS
    assert (changed.layout != weight.layout) == (in_groups or layout == mxfp4.LAYOUT)
    if changed.layout != weight.layout:
        assert changed.arrays["scales"].shape == (INPUTS // layout.group, *MORE_THAN_A_PIECE)
    if in_groups:
        np.testing.assert_array_equal(jax.jit(matmul)(x, changed), jax.jit(matmul)(x, weight))
    np.testing.assert_allclose(jax.jit(matmul)(x, changed), jax.jit(matmul)(x, weight), rtol=1e-5, atol=1e-4)
    assert for_kernels(changed).layout == changed.layout


@pytest.mark.parametrize("layout", WEIGHTS)
def test_it_is_the_same_stack_of_experts(layout):
    weight = example(layout, STACK, OF_EXPERTS)
    changed = for_kernels(weight)
    assert changed.shape == weight.shape
    np.testing.assert_array_equal(dense(changed), dense(weight))
    np.testing.assert_array_equal(dense(changed.expert(3)), dense(weight.expert(3)))
    if getattr(layout, "ordered", False):
        return
    x, groups = inputs(len(ENTRIES)), group(ENTRIES, 5, most=len(ENTRIES))
    rows = x.at[groups.entries].get(mode="fill", fill_value=0)
    result = jax.jit(grouped_matmul)(rows, changed, groups).reshape(-1, 2, 20)[groups.places]
    np.testing.assert_allclose(result, grouped_reference(x, weight.dequantize(), ENTRIES), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("layout", [LAYOUTS["int4 with zeros"], LAYOUTS["int8 times a factor"], mxfp4.LAYOUT])
def test_specs_and_shapes_change_as_arrays_do(layout):
    weight = example(layout, STACK, OF_EXPERTS)
    changed = for_kernels(weight)
    shapes = for_kernels(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), weight))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), changed) == jax.tree.map(lambda a: (a.shape, a.dtype), shapes)
    specs = for_kernels(weight.rebuilt({name: _spec(array) for name, array in weight.items()}))
    assert specs.layout == changed.layout
    for name, array in changed.items():
        assert (specs.arrays[name].shape, specs.arrays[name].dtype) == (array.shape, array.dtype.name)
    assert specs.arrays["scales"].axes == ("groups", *OF_EXPERTS[:-1])


def _spec(array):
    last = "embed" if array.shape[-1] == INPUTS else "groups"
    return ParamSpec(array.shape, (*OF_EXPERTS[:-1], last), dtype=array.dtype.name)


def test_tables_stay_as_they_are():
    weight = example(LAYOUTS["int4"], (8,), ("vocab", "embed"))
    assert for_kernels(weight) is weight


def test_a_codebook_that_is_not_mxfp4_stays_as_it_is():
    for layout in (LAYOUTS["codebook, powers of two"], Codebook(mxfp4.LAYOUT.table, 16, "float8_e4m3fn", divided=True)):
        weight = example(layout, STACK, OF_EXPERTS)
        assert for_kernels(weight) is weight


@pytest.mark.parametrize("layout", [LAYOUTS["int4 with zeros"], LAYOUTS["int8 times a factor"], mxfp4.LAYOUT])
def test_a_kernel_multiplies_experts(layout, monkeypatch):
    """On Hopper GPUs the kernel tiles all experts, without a loop over experts."""
    weight = for_kernels(example(layout, (5, 2, 64), OF_EXPERTS))
    x = inputs(len(ENTRIES), dtype="bfloat16")
    assert grouped_path(x, weight) == "xla"
    interpreted = functools.partial(launch.matmul_tiles, interpret=compat.interpret_params())
    monkeypatch.setattr(launch, "matmul_tiles", interpreted)
    monkeypatch.setattr("pallas_kernels.choice.lowering_target", lambda: Target("gpu", HOPPER))
    assert grouped_path(x, weight, weight) == "mosaic"
    assert grouped_path(x.astype(jnp.float32), weight) == "xla"
    groups = group(ENTRIES, 5, most=len(ENTRIES), path="mosaic")
    rows = x.at[groups.entries].get(mode="fill", fill_value=0)
    result = compat.interpreted(lambda: jax.jit(grouped_matmul)(rows, weight, groups))
    exact = grouped_reference(x.astype(jnp.float32), weight.dequantize(), ENTRIES)
    result = result.reshape(-1, 2, 64)[groups.places]
    np.testing.assert_allclose(result.astype(jnp.float32), exact, rtol=2**-8, atol=1e-3)


def test_weights_with_rounded_inputs_are_left_to_xla():
    layout = Grouped("int8", INPUTS, activations="int8")
    weight = for_kernels(example(layout, STACK, OF_EXPERTS))
    assert weight.layout == layout
