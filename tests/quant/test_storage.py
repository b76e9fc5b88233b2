"""Products with stored weights equal products with the same weights dequantised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.quant import (
    Quantized,
    Split,
    dense,
    grouped_matmul,
    matmul,
    matmul_transposed,
    swiglu,
    take,
    with_values,
)
from jaxinfer.quant.layouts import Blocks, Codebook, Grouped
from pallas_kernels.grouped_matmul import group
from pallas_kernels.grouped_matmul.reference import matmul as grouped_reference
from tests.lowered import as_for_gpu
from tests.quant.examples import INPUTS, LAYOUTS, TABLE, example

WEIGHTS = [pytest.param(layout, id=name) for name, layout in LAYOUTS.items()]
MORE_THAN_A_PIECE = (3, 100)


def inputs(*lead: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal((*lead, INPUTS)), jnp.float32)


def assert_near(result, expected):
    scale = float(jnp.abs(expected).max())
    np.testing.assert_allclose(result, expected, atol=3e-6 * scale)


@pytest.mark.parametrize("layout", WEIGHTS)
def test_a_product(layout):
    weight, x = example(layout, MORE_THAN_A_PIECE), inputs(2, 5)
    assert weight.shape == (*MORE_THAN_A_PIECE, INPUTS)
    expected = jnp.einsum("abk,cnk->abcn", x, weight.dequantize(), precision="highest")
    assert_near(jax.jit(matmul)(x, weight), expected)
    assert_near(jax.jit(matmul_transposed)(x, weight), expected)


@pytest.mark.parametrize("layout", WEIGHTS)
def test_a_product_in_bfloat16_has_that_dtype(layout):
    weight, x = example(layout, (40,)), inputs(3).astype(jnp.bfloat16)
    result = jax.jit(matmul)(x, weight)
    assert result.dtype == jnp.bfloat16
    expected = jnp.einsum("bk,nk->bn", x.astype(jnp.float32), weight.dequantize())
    np.testing.assert_allclose(result, expected, atol=0.02 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("kind", ["codebook, nested", "ggml"])
def test_a_product_on_a_gpu_is_no_loop(kind, monkeypatch):
    """In a loop XLA may copy on another stream, which prevents a command buffer. Barriers order the slices."""
    monkeypatch.setattr("pallas_kernels.quant_matmul.xla.GPU_PIECE", 128 * INPUTS * 4)
    weight, x = example(LAYOUTS[kind], MORE_THAN_A_PIECE), inputs(7)
    expected = jnp.einsum("bk,cnk->bcn", x, weight.dequantize(), precision="highest")
    assert_near(as_for_gpu(matmul)(x, weight), expected)
    program = str(as_for_gpu(matmul).trace(x, weight).jaxpr)
    assert "scan[" not in program
    assert "while[" not in program
    assert program.count("= optimization_barrier") == 2  # 300 channels by 128
    assert "scan[" in str(jax.make_jaxpr(matmul)(x, weight))  # on a CPU, over slices that fit its cache


@pytest.mark.parametrize("layout", WEIGHTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_a_table(layout, dtype):
    table, ids = with_values(example(layout, (50,)), dtype), jnp.asarray([[3, 49], [0, 3]])
    rows = jax.jit(take)(table, ids)
    assert rows.dtype == dtype
    # a compiled program may fuse a product and a sum into one rounding
    np.testing.assert_allclose(rows, table.dequantize()[ids], rtol=1e-6 if dtype == "float32" else 2**-8, atol=1e-7)


@pytest.mark.parametrize("layout", [weight for weight in WEIGHTS if not getattr(weight.values[0], "ordered", False)])
def test_experts(layout):
    weight, entries = example(layout, (5, 2, 20)), np.asarray([3, 0, 3, 4, 4, 9, 1, 4, 3, 3, 3, 3, 3, 3], np.int32)
    groups = group(jnp.asarray(entries), 5, most=len(entries))
    x = inputs(len(entries))
    rows = x.at[groups.entries].get(mode="fill", fill_value=0)
    result = jax.jit(grouped_matmul)(rows, weight, groups).reshape(-1, 2, 20)
    result = result.at[groups.places].get(mode="fill", fill_value=0)
    assert_near(result, grouped_reference(x, weight.dequantize(), jnp.asarray(entries)))


def test_pieces_stored_in_different_ways():
    pieces = (
        example(LAYOUTS["int4"], (2, 3, 20)),
        example(LAYOUTS["codebook"], (2, 1, 20)),
        jnp.ones((2, 1, 20, INPUTS)),
    )
    weight, x = Split(pieces, 1), inputs(4)
    assert weight.shape == (2, 5, 20, INPUTS)
    assert dense(weight).shape == weight.shape
    expected = jnp.einsum("bk,ghnk->bghn", x, dense(weight), precision="highest")
    assert_near(jax.jit(matmul)(x, weight), expected)


def test_columns_in_another_order_come_back():
    layout = LAYOUTS["int4 in another order"]
    weight = example(layout, (7,))
    plain = weight.layout.dequantize({name: weight.arrays[name] for name in ("codes", "scales", "zeros")})
    for column, at in enumerate(np.asarray(weight.arrays["order"])):
        np.testing.assert_array_equal(weight.dequantize()[:, at], plain[:, column])


def test_rows_of_a_gated_mlp_are_computed_alike_whatever_the_order():
    """XLA:CPU would fuse the activation into the gather by ``order``, whose loop rounds a fifth row otherwise."""
    layout = LAYOUTS["int4 in another order"]
    gate_up = Split(tuple(example(layout, (1, INPUTS), seed=seed) for seed in range(2)), 0)
    down = example(layout, (INPUTS,))
    mlp = jax.jit(lambda x: matmul(swiglu(x, gate_up), down))
    for row in 0.1 * np.random.default_rng(0).standard_normal((100, INPUTS), np.float32):
        rows = np.asarray(mlp(np.tile(row, (5, 1))))
        assert all(other.tobytes() == rows[0].tobytes() for other in rows)


def test_a_weight_is_a_pytree_whose_form_is_its_layout():
    one, other = (example(LAYOUTS[name], (8,)) for name in ("int4", "int4 with zeros"))
    assert jax.tree.structure(one) != jax.tree.structure(other)
    assert isinstance(jax.tree.map(jnp.zeros_like, one), Quantized)
    assert one.rebuilt(dict(one.items())) == one


@pytest.mark.parametrize("layout", [Grouped("int4", 48), Codebook(TABLE, 48), Blocks("Q8_0")])
def test_groups_that_do_not_fit(layout):
    with pytest.raises(ValueError, match=r"groups of (48|32) do not divide 72 inputs"):
        layout.parts(72)


def test_what_is_stored_is_never_numbers_as_a_whole():
    """No temporary of the program has the size of the dequantised weight."""
    weight = example(LAYOUTS["codebook"], (4096,))
    compiled = jax.jit(matmul).lower(inputs(2), weight).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * INPUTS * 4 / 2
