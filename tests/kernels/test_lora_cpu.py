"""Both row orders on CPU match the exact products and are bitwise identical to each other."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxinfer.quant.lora_weight import rows_of
from pallas_kernels.grouped_matmul import Groups, group
from pallas_kernels.lora import cpu
from pallas_kernels.lora.cpu import BySlot, by_slot, low_rank

SLOTS = 8
SHAPES = [(64, 4, 40), (768, 16, 768), (768, 48, 2304), (2048, 16, 768), (300, 33, 1001)]  # inputs, rank, outputs


def operands(inputs: int, rank: int, outputs: int, rows: int, dtype: str) -> list[jax.Array]:
    rng = np.random.default_rng(inputs)
    shapes = [(rows, inputs), (SLOTS, rank, inputs), (SLOTS, outputs, rank)]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_ways_have_the_same_bits(shape, dtype, monkeypatch):
    x, a, b = operands(*shape, 32, dtype)
    run = jax.jit(low_rank)
    for slots in (np.arange(32) % 9 - 1, np.repeat([3, -1, 0, 7, 5, 1, 2, 6], 4), np.full(32, 3)):
        rows = rows_of(jnp.asarray(slots, jnp.int32), SLOTS)
        both = np.asarray(run(x, a, b, rows.groups, rows.by_slot)), np.asarray(run(x, a, b, rows.groups, None))
        np.testing.assert_array_equal(*both)
        own = np.einsum("rk,rjk->rj", *(np.asarray(each, np.float64) for each in (x, a[slots])))
        want = np.einsum("rj,rnj->rn", own, np.asarray(b[slots], np.float64))
        want[slots < 0] = 0
        np.testing.assert_allclose(
            both[0].astype(np.float64), want, atol=abs(want).max() * (3e-6, 2e-2)[dtype != "float32"]
        )


@jax.jit
def dealt_out(slots: jax.Array) -> tuple[Groups, BySlot | None]:
    groups = group(slots, 6, most=24)
    return groups, by_slot(groups, 6)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(-1, 5), min_size=24, max_size=24))
def test_rows_by_slot(slots):
    groups, found = dealt_out(np.array(slots, np.int32))
    size = groups.entries.shape[1]
    counts = np.bincount([each for each in slots if each >= 0], minlength=6)
    assert bool(found.suits) == (counts.max() <= size and 2 * (counts > 0).sum() >= 6)
    assert [int(place) // size if place < 6 * size else -1 for place in found.places] == slots or not found.suits
    if found.suits:
        for slot in range(6):
            held = [int(row) for row in found.entries[slot] if row < len(slots)]
            assert held == [row for row, each in enumerate(slots) if each == slot]
            assert all(int(found.entries.reshape(-1)[found.places[row]]) == row for row in held)


def test_experts_one_behind_the_other_have_no_rows_by_slot(monkeypatch):
    groups = group(jnp.zeros(4, jnp.int32), 2, most=4)
    assert by_slot(groups._replace(experts=None), 2) is None
    x, a, b = operands(16, 2, 8, 4, "float32")
    monkeypatch.setattr(cpu, "_at_once", None)
    assert low_rank(x, a, b, groups, None).shape == (4, 8)
