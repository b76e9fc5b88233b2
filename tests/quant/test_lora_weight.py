"""Weights with adapters against float64, and batch invariance of rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.quant import LoRAWeight, Split, dense, grouped_matmul, matmul, matmul_transposed, take
from jaxinfer.quant.lora_weight import rows_of
from pallas_kernels.grouped_matmul import group
from tests.quant.examples import INPUTS, LAYOUTS, example

OUT, RANK, SLOTS = (3, 40), 4, 3
STORAGES = [pytest.param(layout, id=name) for name, layout in LAYOUTS.items()]
MATMUL = {"matmul": jax.jit(matmul), "matmul_transposed": jax.jit(matmul_transposed)}


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def banks(*lead: int, out=OUT, inputs=INPUTS) -> dict[str, np.ndarray]:
    shapes = {"a": (RANK, inputs), "b": (*out, RANK), "magnitude": out, "bias": out}
    return {name: numbers(number, *lead, *shape) for number, (name, shape) in enumerate(shapes.items(), start=10)}


def expected(x, weight, arrays) -> np.ndarray:
    """Return one row, or rows of one adapter, in float64; ``weight`` is [*out, in]."""
    x, weight, a, b, magnitude, bias = (np.float64(one) for one in (x, weight, *arrays.values()))
    low = np.tensordot(x @ np.swapaxes(a, -1, -2), b, (-1, -1))
    return magnitude * (np.tensordot(x, weight, (-1, -1)) + low) + bias


def assert_near(result, wanted, tolerance=3e-6):
    np.testing.assert_allclose(np.float64(result), wanted, atol=tolerance * np.abs(wanted).max())


def of_slot(arrays, slot):
    return {name: array[slot] for name, array in arrays.items()}


@pytest.mark.parametrize("product", MATMUL)
def test_one_adapter_of_all_rows(product):
    weight, x, arrays = numbers(0, *OUT, INPUTS), numbers(1, 2, 5, INPUTS), banks()
    base = np.moveaxis(weight, -1, 0) if product == "matmul" else weight
    result = MATMUL[product](x, LoRAWeight(jnp.asarray(base), **arrays))
    assert_near(result, expected(x, weight, arrays))


@pytest.mark.parametrize("layout", STORAGES)
def test_rows_of_several_adapters_over_every_storage(layout):
    weight, x, arrays = example(layout, OUT), numbers(1, 9, INPUTS), banks(SLOTS)
    slots = np.int32([2, -1, 0, 2, 2, -1, 1, 0, 2])
    adapted = LoRAWeight(weight, **arrays, rows=rows_of(jnp.asarray(slots), SLOTS))
    plain, result = MATMUL["matmul"](x, weight), np.asarray(MATMUL["matmul"](x, adapted))
    for row, slot in enumerate(slots):
        if slot < 0:
            np.testing.assert_array_equal(result[row], plain[row])
        else:
            assert_near(result[row], expected(x[row], dense(weight), of_slot(arrays, slot)))


def test_a_weight_of_several_storages():
    pieces = tuple(example(LAYOUTS[name], (rows, 40)) for name, rows in (("int4", 1), ("ggml", 2)))
    weight, x, arrays = Split(pieces, 0), numbers(1, 4, INPUTS), banks()
    assert_near(MATMUL["matmul"](x, LoRAWeight(weight, **arrays)), expected(x, dense(weight), arrays))


def test_bfloat16_is_added_in_float32_and_keeps_its_dtype():
    x, arrays = numbers(1, 6, INPUTS), banks(SLOTS)
    weight, slots = numbers(0, *OUT, INPUTS), jnp.int32([0, 1, 2, 0, -1, 1])
    low = jax.tree.map(lambda array: jnp.asarray(array, jnp.bfloat16), (x, weight, arrays["a"], arrays["b"]))
    adapted = LoRAWeight(low[1], low[2], low[3], arrays["magnitude"], arrays["bias"], rows_of(slots, SLOTS))
    result = MATMUL["matmul_transposed"](low[0], adapted)
    assert result.dtype == jnp.bfloat16
    assert_near(result[1], expected(x[1], weight, of_slot(arrays, 1)), 0.03)


def test_rows_of_a_table_and_the_tied_head_without_them():
    table, arrays, ids = numbers(0, 30, 20), banks(out=(20,), inputs=30), np.int32([[3, 29], [0, 3]])
    adapted = LoRAWeight(jnp.asarray(table), **arrays, table=True)
    onehot = np.eye(30)[ids]
    assert_near(jax.jit(take)(adapted, ids), expected(onehot, table.T, arrays))
    x = numbers(1, 4, 20)
    np.testing.assert_array_equal(
        MATMUL["matmul_transposed"](x, adapted), MATMUL["matmul_transposed"](x, jnp.asarray(table))
    )


@pytest.mark.parametrize("layout", STORAGES)
def test_lookups_of_several_adapters_over_every_storage(layout):
    """A tied table has separate adapters for lookups and for products; a row's result depends on no other row."""
    table, ids, slots = example(layout, (40,)), np.int32([3, 0, 39, 3, 7, 3]), np.int32([2, -1, 0, 0, 1, -1])
    rows = rows_of(jnp.asarray(slots), SLOTS)
    looked, multiplied = banks(SLOTS, out=(INPUTS,), inputs=40), banks(SLOTS, out=(40,))
    adapted = LoRAWeight(
        LoRAWeight(table, **looked, rows=rows, table=True, axes=("embed", "vocab")), **multiplied, rows=rows
    )
    plain, result = jax.jit(take)(table, ids), np.asarray(jax.jit(take)(adapted, ids))
    x = numbers(1, len(ids), INPUTS)
    product = np.asarray(MATMUL["matmul_transposed"](x, adapted))
    for row, slot in enumerate(slots):
        if slot < 0:
            np.testing.assert_array_equal(result[row], plain[row])
        else:
            onehot = np.eye(40)[ids[row]]
            assert_near(result[row], expected(onehot, np.asarray(dense(table)).T, of_slot(looked, slot)))
            assert_near(product[row], expected(x[row], dense(table), of_slot(multiplied, slot)))
    others = jnp.int32([2, 2, 1, -1, 1, 0])
    beside = dataclasses.replace(adapted.base, rows=rows_of(others, SLOTS))
    np.testing.assert_array_equal(np.asarray(jax.jit(take)(beside, ids))[[0, 4]], result[[0, 4]])


EXPERTS, TOP_K, TOKENS = 3, 2, 7


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("banked", [False, True])
def test_experts(stored, banked):
    weight = (
        example(LAYOUTS["int8 in groups"], (EXPERTS, *OUT))
        if stored
        else jnp.asarray(numbers(0, EXPERTS, *OUT, INPUTS))
    )
    arrays = banks(SLOTS, EXPERTS) if banked else banks(EXPERTS)
    x, slots = numbers(1, TOKENS, INPUTS), np.int32([0, 2, -1, 1, 2, 2, -1]) if banked else np.zeros(TOKENS, int)
    experts = np.stack([np.random.default_rng(token).permutation(EXPERTS)[:TOP_K] for token in range(TOKENS)])

    @jax.jit
    def run(weight, arrays, x, experts, slots):
        groups = group(experts.reshape(-1), EXPERTS, most=TOKENS)
        rows = rows_of(slots, SLOTS) if banked else None
        tiles = x.at[groups.entries // TOP_K].get(mode="fill", fill_value=0)
        result = grouped_matmul(tiles, LoRAWeight(weight, **arrays, rows=rows), groups)
        plain = grouped_matmul(tiles, weight, groups)
        return [one.reshape(-1, *OUT)[groups.places].reshape(TOKENS, TOP_K, *OUT) for one in (result, plain)]

    result, plain = run(weight, arrays, x, experts.astype(np.int32), slots)
    for token, slot in enumerate(slots):
        for choice, expert in enumerate(experts[token]):
            if slot < 0:
                np.testing.assert_array_equal(result[token, choice], plain[token, choice])
                continue
            own = of_slot(of_slot(arrays, slot) if banked else arrays, expert)
            assert_near(result[token, choice], expected(x[token], dense(weight)[expert], own))


# ---- batch invariance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize(("inputs", "out"), [(256, (512,)), (768, (3, 5, 64)), (2048, (768,)), (96, (4100,))])
def test_a_row_keeps_its_bits_whatever_is_beside_it(dtype, runs, inputs, out):
    """Other rows, other adapters, another slot of its adapter, another row index; many rows of one adapter, or few."""
    rows, slots = 32, 8
    x, weight = (
        jnp.asarray(numbers(seed, *shape), dtype) for seed, shape in ((1, (rows, inputs)), (2, (*out, inputs)))
    )
    arrays = {
        name: jnp.asarray(array, dtype if name in "ab" else "float32")
        for name, array in banks(slots, out=out, inputs=inputs).items()
    }

    @jax.jit
    def run(x, arrays, of_rows):
        return matmul_transposed(x, LoRAWeight(weight, **arrays, rows=rows_of(of_rows, slots, runs=runs)))

    rng = np.random.default_rng(3)
    want = np.asarray(run(x, arrays, jnp.full(rows, -1).at[5].set(2)))[5]
    for turn in range(10):
        places, order = rng.permutation(slots), rng.permutation(rows)
        of_rows = rng.integers(-1, slots if turn % 4 else 2, rows)
        at, slot = int(np.flatnonzero(order == 5)[0]), int(np.flatnonzero(places == 2)[0])
        of_rows[at] = slot
        moved = {name: array[places].at[(slot + 1) % slots].multiply(7) for name, array in arrays.items()}
        np.testing.assert_array_equal(np.asarray(run(x[order], moved, jnp.asarray(of_rows)))[at], want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_without_an_adapter_keep_the_bits_of_the_weight(dtype):
    x, weight = (jnp.asarray(numbers(seed, *shape), dtype) for seed, shape in ((1, (32, 256)), (2, (512, 256))))
    arrays = banks(8, out=(512,), inputs=256)
    of_rows = jnp.arange(32) % 9 - 1
    result = MATMUL["matmul_transposed"](x, LoRAWeight(weight, **arrays, rows=rows_of(of_rows, 8)))
    plain = np.asarray(MATMUL["matmul_transposed"](x, weight))
    np.testing.assert_array_equal(np.asarray(result)[of_rows < 0], plain[of_rows < 0])
    assert (np.asarray(result)[of_rows >= 0] != plain[of_rows >= 0]).mean() > 0.9


def test_infinite_numbers_of_another_adapter_reach_nobody():
    x, weight, arrays = numbers(1, 4, INPUTS), jnp.asarray(numbers(0, *OUT, INPUTS)), banks(SLOTS)
    rows = rows_of(jnp.int32([0, -1, 0, 1]), SLOTS)
    broken = {name: array.copy() for name, array in arrays.items()}
    for array in broken.values():
        array[1:] = np.inf
    good, bad = (MATMUL["matmul_transposed"](x, LoRAWeight(weight, **each, rows=rows)) for each in (arrays, broken))
    np.testing.assert_array_equal(good[:3], bad[:3])
    assert not np.isfinite(bad[3]).any()
