"""The Mosaic GPU kernel of grouped_matmul, interpreted on the CPU. Compilation to machine code: test_check.py."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.layers import moe
from pallas_kernels import compat
from pallas_kernels.choice import Choice
from pallas_kernels.grouped_matmul import api, group, mosaic
from pallas_kernels.grouped_matmul.mosaic import Tiles
from tests.kernels.quant_cases import DIGITS

EXPERTS = 4


def operands(rows, *, n=128, k=128, dtype=jnp.bfloat16, seed=0):
    """Return inputs, weights of four experts, and the expert of each row: the third has most rows, the second none."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(rows, k)), dtype)
    weights = jnp.asarray(rng.normal(size=(EXPERTS, n, k)), dtype)
    owners = rng.choice([0, 2, 3, EXPERTS], rows, p=[0.2, 0.6, 0.1, 0.1])
    return x, weights, jnp.asarray(owners, jnp.int32)


def in_tiles(x, groups, filler=0.0):
    return x.at[groups.entries].get(mode="fill", fill_value=filler)


def run(x, weights, groups, tiles, matmul=mosaic.matmul):
    product = jax.jit(lambda *a: matmul(*a, tiles=tiles, interpret=compat.interpret_params()))
    return np.asarray(compat.interpreted(lambda: product(x, weights, groups)))


def assert_close(got, x, weights, groups):
    """Check rows against their experts' weights in float64, to half a unit in the last place; empty tiles are zero."""
    wide, experts = np.asarray(x, np.float64), np.asarray(groups.experts)
    own = np.asarray(weights, np.float64)[experts]
    want, sizes = (np.einsum("trk,tnk->trn", *pair) for pair in ((wide, own), (np.abs(wide), np.abs(own))))
    rounding = np.exp2(np.floor(np.log2(np.maximum(np.abs(want), 1e-30))) - DIGITS[got.dtype.name])
    occupied, held = int(groups.occupied), np.asarray(groups.entries) < groups.places.shape[0]
    held[occupied:] = False
    error = np.abs(got.astype(np.float64) - want)
    np.testing.assert_array_less(error[held], (rounding + 1e-6 * sizes)[held])
    assert not got[occupied:].any()


CASES = {
    "uneven groups": (37, {"n": 192, "k": 192}, Tiles(3, 64, 2, 3)),
    "one row": (1, {}, Tiles(2, 64, 2, 2)),
    "float16, a ring longer than the work": (9, {"n": 64, "dtype": jnp.float16}, Tiles(1, 128, 4, 3)),
    "four consumers": (60, {"n": 256, "k": 256}, Tiles(4, 64, 3, 2)),
    "more blocks than units": (5, {"n": 64}, Tiles(1, 64, 2, 50)),
    "whole tiles of 128 rows": (400, {"n": 128, "k": 64}, Tiles(2, 64, 2, 3)),
    "several panels": (500, {"n": 64, "k": 64}, Tiles(1, 64, 2, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name):
    rows, options, tiles = CASES[name]
    x, weights, owners = operands(rows, **options)
    groups = group(owners, EXPERTS, 16 if name == "several panels" else rows, path="mosaic")
    tiled = in_tiles(x, groups)
    assert_close(run(tiled, weights, groups, tiles), tiled, weights, groups)


def test_what_belongs_to_nobody_changes_nothing():
    """NaN in rows without an entry, in empty tiles and in the weights of unused experts changes no result.

    Groups are uneven: some end inside a tile, one has two tiles; their other rows are compared with float64.
    """
    x, weights, owners = operands(21)
    groups = group(owners, EXPERTS, 8, path="mosaic")
    assert 0 < int(groups.occupied) < len(groups.entries)
    assert not (np.asarray(owners) == 1).any()
    got = run(in_tiles(x, groups, np.nan), weights.at[1].set(jnp.nan), groups, Tiles(2, 64, 2, 3))
    assert_close(got, in_tiles(x, groups), weights, groups)
    padding = np.asarray(groups.entries) == 21
    assert np.isnan(got[: int(groups.occupied)][padding[: int(groups.occupied)]]).all()


@pytest.mark.slow
def test_no_bit_of_a_row_depends_on_others_or_on_the_pieces_of_the_work():
    x, weights, owners = operands(24, n=128, k=192)
    groups = group(owners, EXPERTS, 16, path="mosaic")
    row = int(np.argmax(np.asarray(owners) == 2))
    expected = run(in_tiles(x, groups), weights, groups, Tiles(2, 64, 2, 2)).reshape(-1, 128)[groups.places[row]]
    others = jnp.full_like(x, jnp.nan).at[row].set(x[row])
    theirs = group(jnp.full_like(owners, 2), EXPERTS, 16, path="mosaic")
    got = run(in_tiles(others, theirs), weights, theirs, Tiles(1, 64, 3, 5)).reshape(-1, 128)[theirs.places[row]]
    assert got.tobytes() == expected.tobytes()


@pytest.mark.slow
def test_no_row_at_all():
    x, weights, owners = operands(6)
    groups = group(jnp.full_like(owners, EXPERTS), EXPERTS, 6, path="mosaic")
    assert int(groups.occupied) == 0
    assert not run(in_tiles(x, groups, np.nan), weights.at[:].set(jnp.nan), groups, Tiles(2, 64, 2, 2)).any()


@pytest.mark.parametrize(("occupied", "parts"), [(0, 3), (5, 1), (16, 1), (17, 3), (40, 3)])
def test_units_are_each_tile_and_part_once_and_empty_tiles_come_last(occupied, parts):
    count = 40
    shape = mosaic._Shape(count, 8, EXPERTS, 64 * parts, 128, jnp.bfloat16, Tiles(1, 64))
    numbers = jnp.arange(count * parts, dtype=jnp.int32)
    units = jax.jit(jax.vmap(lambda number: jnp.stack(mosaic._unit_at(shape, occupied, number))))(numbers)
    tiles, channels, steps = np.asarray(units).T
    assert sorted(zip(tiles, channels, strict=True)) == [(t, 64 * p) for t in range(count) for p in range(parts)]
    assert (tiles[: occupied * parts] < occupied).all()
    np.testing.assert_array_equal(steps, np.where(numbers < occupied * parts, 2, 0))
    assert (np.diff(tiles[: occupied * parts] // mosaic.PANEL) >= 0).all()


@pytest.mark.slow
def test_a_mixture_of_experts_by_the_kernel_equals_that_by_xla(monkeypatch):
    """`run_experts` gives the same output with the tiles of either path."""
    rng = np.random.default_rng(0)
    x, gate_up, down = (
        jnp.asarray(rng.normal(size=dims) / 3, jnp.bfloat16)
        for dims in ((13, 64), (EXPERTS, 2, 64, 64), (EXPERTS, 64, 64))
    )
    chosen = jnp.asarray([rng.permutation(EXPERTS + 1)[:2] for _ in range(13)], jnp.int32)
    routing = moe.Routing(chosen, jnp.asarray(rng.uniform(size=(13, 2)), jnp.float32))
    run_layer = jax.jit(lambda: moe.run_experts(x, routing, moe.Experts(gate_up, down), moe.GLU("silu")))
    expected = run_layer()
    kernel = functools.partial(mosaic.matmul, tiles=Tiles(1, 64, 2, 2), interpret=compat.interpret_params())
    monkeypatch.setattr(api, "choose", lambda *_, **__: Choice("mosaic", ""))
    monkeypatch.setattr(mosaic, "matmul", kernel)
    jax.clear_caches()
    assert "grouped_matmul" in str(jax.make_jaxpr(run_layer)())
    assert jnp.abs(expected).max() > 1
    np.testing.assert_allclose(compat.interpreted(run_layer), expected, rtol=0, atol=4e-2)


# Source text of the kernel and its faulty replacement.
MUTATIONS = {
    "wait for copies": ("plgpu.barrier_wait(barriers.ready.at[slot])", "pass"),
    "wait for a free slot": ("pl.when(done + index >= stages)(functools.partial(await_free, done + index))", "pass"),
    "wait for a copy out": ("plgpu.wait_smem_to_gmem(0, wait_read_only=True)", "pass"),
    "a tile's expert": (
        "expert = jnp.clip(gmem.experts[unit.tile], 0",
        "expert = jnp.clip(gmem.experts[unit.tile] * 0, 0",
    ),
    "a consumer's channels": (
        "own = pl.ds(pl.multiple_of(warpgroup * CHANNELS",
        "own = pl.ds(pl.multiple_of(0 * CHANNELS",
    ),
    "a unit's channels": ("channels = pl.ds(pl.multiple_of(unit.channel, ", "channels = pl.ds(pl.multiple_of(0, "),
    "a step's inputs": ("pl.ds(pl.multiple_of(index * shape.tiles.depth, ", "pl.ds(pl.multiple_of(index * 0, "),
    "a tile of a panel": ("first + lax.rem(within, size)", "first + lax.rem(within, size) * 0"),
    "tiles that hold nothing": ("empty = number >= occupied * shape.parts", "empty = number < 0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught(name):
    old, new = MUTATIONS[name]
    source = inspect.getsource(mosaic)
    assert source.count(old) == 1, source.count(old)
    mutant = dict(mosaic.__dict__)
    exec(compile(source.replace(old, new), mosaic.__file__, "exec"), mutant)
    x, weights, owners = operands(37, n=256, k=192)
    groups = group(owners, EXPERTS, 16, path="mosaic")
    tiled = in_tiles(x, groups)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        assert_close(
            run(tiled, weights, groups, mutant["Tiles"](2, 64, 2, 3), mutant["matmul"]), tiled, weights, groups
        )


BF16, FP16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


@pytest.mark.parametrize(
    ("x", "weights", "tiles", "why"),
    [
        ((BF16, 3, 8, 96), (BF16, 4, 128, 96), None, "64 inputs"),
        ((BF16, 3, 8, 128), (BF16, 4, 96, 128), None, "64 outputs"),
        ((BF16, 3, 8, 64), (BF16, 4, 128, 128), None, "x (3, 8, 64)"),
        ((F32, 3, 8, 128), (F32, 4, 128, 128), None, "float32"),
        ((BF16, 3, 8, 128), (FP16, 4, 128, 128), None, "float16 weights times bfloat16"),
        ((BF16, 3, 4, 128), (BF16, 4, 128, 128), None, "4 rows"),
        ((BF16, 3, 136, 128), (BF16, 4, 128, 128), None, "136 rows"),
        ((BF16, 3, 8, 128), (BF16, 4, 128, 128), Tiles(3), "does not divide"),
        ((BF16, 3, 128, 128), (BF16, 4, 128, 128), Tiles(2, 128, 8), "shared memory"),
    ],
)
def test_refuses_what_it_cannot_do(x, weights, tiles, why):
    operands = (jax.ShapeDtypeStruct(dims, dtype) for dtype, *dims in (x, weights))
    assert why in mosaic.refusal(*operands, tiles=tiles)


def test_tiles_of_impossible_numbers_are_refused():
    for fields in ({"depth": 32}, {"consumers": 5}, {"stages": 1}, {"blocks": 0}):
        with pytest.raises(ValueError, match=r"there|consumers"):
            Tiles(**fields)


@pytest.mark.parametrize("rows", [8, 16, 64, 128])
@pytest.mark.parametrize(("channels", "inputs"), [(64, 64), (2880, 2880), (4096, 14336), (28672, 4096), (3072, 5120)])
def test_heuristic_tiles_fit(rows, channels, inputs):
    for count in (1, 9, 300):
        x, weights = (
            jax.ShapeDtypeStruct(dims, jnp.bfloat16) for dims in ((count, rows, inputs), (8, channels, inputs))
        )
        tiles = mosaic.heuristic_tiles(x, weights)
        assert mosaic.refusal(x, weights, tiles=tiles) is None
        assert tiles.stages > 2
