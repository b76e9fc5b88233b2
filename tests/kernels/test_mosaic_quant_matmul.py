"""The Mosaic GPU kernel of quant_matmul, interpreted on the CPU. Compilation to machine code: test_check.py."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.grouped_matmul import group
from pallas_kernels.quant_matmul import reference
from pallas_kernels.quant_matmul.mosaic import kernel, launch
from pallas_kernels.quant_matmul.types import Tiles
from tests.kernels.quant_cases import assert_close, operands, stack

FP16, FP8, INT8 = jnp.float16, jnp.float8_e4m3fn, jnp.int8
TINY = Tiles(consumers=1, depth=128, stages=2)


def run(arrays, tiles=None, matmul=launch.matmul, **options):
    product = jax.jit(lambda *a: matmul(*a, tiles=tiles, interpret=compat.interpret_params(), **options))
    return compat.interpreted(lambda: product(*arrays))


def by_expert(x, ids, weights, *, tiles=None, kernel_rows=(8, 32), **options):
    """Return the product of each row with its expert's weights; check that empty tiles are 0."""
    groups = group(ids, weights[0].shape[0], x.shape[0], path="mosaic", kernel_rows=kernel_rows)
    rows = x.at[groups.entries].get(mode="fill", fill_value=0)
    out = run((rows, *weights, groups), tiles, launch.matmul_tiles, **options)
    assert not np.asarray(out[int(groups.occupied) :]).any()
    return out.reshape(-1, out.shape[-1])[groups.places]


def assert_each_close(got, x, ids, weights, *, e2m1=False):
    """Check each expert's rows within the bounds of `assert_close`."""
    numbers, scales, zeros = weights
    for expert in range(numbers.shape[0]):
        own = np.asarray(ids) == expert
        factors = scales[:, expert], None if zeros is None else zeros[:, expert]
        assert_close(got[own], (x[own], numbers[expert], *factors), e2m1=e2m1)


CASES = {
    "int4": ({"rows": 3}, Tiles(2, 256, 2)),
    "int4, zeros, uneven splits": (
        {"rows": 9, "k": 768, "zeros": True, "scale_dtype": jnp.float32},
        Tiles(2, 256, 3, splits=2),
    ),
    "int4, float16, group 64": ({"rows": 8, "n": 64, "group": 64, "x_dtype": FP16, "scale_dtype": FP16}, TINY),
    "int8, group over steps": ({"rows": 16, "group": 256, "dtype": INT8, "zeros": True}, Tiles(2, 128, 2)),
    "int8, channel": ({"n": 256, "group": None, "dtype": INT8, "x_dtype": FP16}, Tiles(4, 128, 1)),
    "fp8, channel, splits": ({"n": 64, "k": 768, "group": None, "dtype": FP8}, Tiles(1, 128, 2, splits=3)),
    "int4, group 32": ({"rows": 8, "n": 64, "k": 256, "group": 32, "zeros": True}, TINY),
    "int4, tiles of rows": ({"rows": 130, "k": 256, "zeros": True}, Tiles(2, 128, 2, blocks=3)),
    "int4, tiles of rows, splits": ({"rows": 130, "k": 768}, Tiles(2, 128, 2, splits=3, blocks=1)),
}
FLOAT4 = {
    "few rows": ({"rows": 3, "k": 256}, None),
    "inputs that 128 does not divide": ({"rows": 9, "n": 64, "k": 576}, Tiles(1, 192, 2)),
    "inputs that 64 does not divide": ({"rows": 3, "n": 64, "k": 160}, None),
    "tiles of rows": ({"rows": 130, "n": 64, "k": 512}, Tiles(1, 128, 2, splits=2, blocks=1)),
}
SLOW = {
    f"{jnp.dtype(dtype).name}-{x_dtype.__name__}-{group}-{rows}-{zeros}": (
        {"rows": rows, "n": 256, "k": 768, "group": group, "dtype": dtype, "x_dtype": x_dtype, "zeros": zeros},
        None,
    )
    for dtype in (jnp.int4, INT8, FP8)
    for x_dtype in (jnp.bfloat16, FP16)
    for group, rows, zeros in ((128, 1, True), (64, 17, False), (256, 64, True), (384, 40, False), (None, 24, True))
    if not (zeros and dtype == FP8)
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES | SLOW]
)
def test_equals_float64(name):
    options, tiles = (CASES | SLOW)[name]
    arrays = operands(**options)
    assert_close(run(arrays, tiles), arrays)


@pytest.mark.parametrize("name", FLOAT4)
def test_float4_equals_float64(name):
    options, tiles = FLOAT4[name]
    arrays = operands(e2m1=True, **options)
    assert_close(run(arrays, tiles, e2m1=True), arrays, e2m1=True)


def test_every_float4_is_the_one_of_its_place():
    codes = np.arange(16, dtype=np.uint8)
    numbers = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])  # OCP MX 1.0, table 5.3.3
    places = reference.placed(jnp.asarray(codes))
    np.testing.assert_array_equal(reference._float4(places, jnp.float32), numbers)
    columns = jnp.broadcast_to(places.astype(jnp.bfloat16), (64, 16))
    np.testing.assert_array_equal(kernel._float4(columns)[0].astype(jnp.float32), numbers)


@pytest.mark.parametrize(
    ("options", "tiles"),
    [
        ({"e2m1": True, "k": 320}, None),
        ({"group": 64, "zeros": True}, Tiles(2, 128, 2, blocks=3)),
        pytest.param({"dtype": FP8, "group": 128, "scale_dtype": jnp.float32}, None, marks=pytest.mark.slow),
    ],
    ids=["MXFP4", "int4 with zeros, a few blocks", "fp8"],
)
def test_tiles_of_experts_equal_float64(options, tiles):
    """Expert 1 has most rows, expert 2 none: its weights are not used and may hold any values."""
    weights = stack(4, **options)
    ids = jnp.asarray([0, 1, 1, 3, *[1] * 36])
    x = operands(rows=len(ids), k=weights[0].shape[2])[0]
    unread = weights[1].at[:, 2].set(255 if options.get("e2m1") else jnp.nan)
    e2m1 = options.get("e2m1", False)
    got = by_expert(x, ids, (weights[0], unread, weights[2]), tiles=tiles, e2m1=e2m1)
    assert_each_close(got, x, ids, weights, e2m1=e2m1)


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param((1, 7, 64, 65, 129), id="some"),
        pytest.param(range(1, 301, 13), id="any_number_of_rows", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("e2m1", [False, True])
def test_a_row_has_the_same_bits_at_any_number_of_rows(counts, e2m1):
    """Row counts below and above the split reduction inside CTAs, and other tiles, give the same bits.

    Sums within a span are exact, since the interpreter adds them in processor order; sums over spans are not.
    """
    x, *rest = operands(rows=300, n=64, k=1024, e2m1=e2m1)
    x = jnp.round(2 * x)
    if e2m1:
        spans = jnp.asarray([120, 107, 125, 102, 129, 110, 121, 99], jnp.uint8).repeat(4)
        rest[1] = spans[:, None] + rest[1] % 2
    whole = np.asarray(run((x, *rest), Tiles(1, 128, 2, splits=2, blocks=1), e2m1=e2m1))
    for rows in counts:
        depth = 128 if rows > 64 else 256
        some = np.asarray(run((x[300 - rows :], *rest), Tiles(1, depth, 2, splits=2, blocks=2), e2m1=e2m1))
        assert some.tobytes() == whole[300 - rows :].tobytes(), rows


def test_an_experts_rows_have_the_bits_of_a_plain_product():
    """Expert tiles of any size, without splits, match a product without experts."""
    weights = stack(2, n=64)
    x, ids = jnp.round(2 * operands(rows=20, k=256)[0]), jnp.asarray([0] * 5 + [1] * 15)
    plain = np.asarray(run((x[5:], weights[0][1], weights[1][:, 1]), Tiles(1, 256, 2)))
    got = np.asarray(by_expert(x, ids, weights, kernel_rows=(16, 16)))
    assert got[5:].tobytes() == plain.tobytes()


def test_other_rows_change_no_bit():
    """Neither the values of other rows, NaN included, nor their count within one program matter."""
    x, *rest = operands(rows=16, k=512, n=64)
    foreign = x.at[jnp.arange(16) != 5].set(jnp.nan)
    tiles = Tiles(1, 128, 2, splits=2)
    whole, alone = (np.asarray(run((rows, *rest), tiles)) for rows in (x, foreign[3:]))
    assert whole[5].tobytes() == alone[2].tobytes()
    assert np.isnan(alone[[0, 1, 3, 12]].astype(np.float32)).all()


# Source text of the kernel, its faulty replacement, and options of the case that must then fail.
MUTATIONS = {
    "wait for copies": ("plgpu.barrier_wait(barriers.ready.at[slot.number])", "pass", {}),
    "wait for a free slot": (
        "pl.when(done + index >= stages)(functools.partial(await_free, done + index))",
        "pass",
        {},
    ),
    "a group's scale": ("slot, first // shape.group)", "slot, 0)", {}),
    "a group's zero": ("_factors(smem.zeros, slot, group)", "_factors(smem.zeros, slot, 0)", {}),
    "a step's groups": ("lax.div(start, jnp.int32(shape.group))", "lax.div(start, jnp.int32(depth))", {}),
    "a block's channels": (
        "pl.ds(pl.multiple_of(unit.channel, CHANNELS)",
        "pl.ds(pl.multiple_of(0, CHANNELS)",
        {"n": 256},
    ),
    "a consumer's channels": ("pl.multiple_of(warpgroup * CHANNELS", "pl.multiple_of(warpgroup * 0", {}),
    "a split's first step": ("lax.div(split * grains, ", "lax.div(split // 2 * grains, ", {}),
    "a span's inputs": ("pl.ds(start, size)].transpose", "pl.ds(0, size)].transpose", {}),
    "a block's next unit": ("block + index * blocks", "block + 0 * blocks", {"rows": 200}),
    "a unit's tile": ("first + lax.rem(within, size)", "first", {"rows": 200}),
    "the splits before": ("optimized=False) + sums)", "optimized=False) * 0 + sums)", {"rows": 200}),
}
FAST_MUTATIONS = ("wait for copies", "a step's groups", "the splits before")
GROUPED_MUTATIONS = {
    "a tile's expert": ("jnp.clip(gmem.experts[unit.tile], 0, shape.experts - 1) if", "0 if", {}),
    "a scale's expert": ("gmem.scales.at[groups, expert, channels]", "gmem.scales.at[groups, 0, channels]", {}),
    "a zero's expert": ("gmem.zeros.at[groups, expert, channels]", "gmem.zeros.at[groups, 0, channels]", {}),
    "a power of two": ("astype(jnp.int32) << 23", "astype(jnp.int32) << 22", {"e2m1": True, "zeros": False}),
    "inputs of two steps": ("if shape.overlap:", "if False:", {"e2m1": True, "zeros": False, "k": 160}),
    "a bend of float4": ("- within(6)", "- within(5)", {"e2m1": True, "zeros": False}),
}
FAST_GROUPED = ("a tile's expert", "a bend of float4")


def mutated(monkeypatch, old, new):
    """Replace the kernel by a mutant."""
    source = inspect.getsource(kernel)
    assert source.count(old) == 1, source.count(old)
    mutant = dict(kernel.__dict__)
    exec(compile(source.replace(old, new), kernel.__file__, "exec"), mutant)
    monkeypatch.setattr(launch, "launcher", mutant["launcher"])


def cases(every, fast):
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in every]


@pytest.mark.parametrize("name", cases(MUTATIONS, FAST_MUTATIONS))
def test_a_mutation_is_caught(name, monkeypatch):
    old, new, options = MUTATIONS[name]
    arrays = operands(**{"rows": 8, "n": 128, "k": 1024, "group": 64, "zeros": True, **options})
    tiles = Tiles(2, 128, 1, splits=2, blocks=1 if "rows" in options else 132)
    assert_close(run(arrays, tiles), arrays)
    mutated(monkeypatch, old, new)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        assert_close(run(arrays, tiles), arrays)


@pytest.mark.parametrize("name", cases(GROUPED_MUTATIONS, FAST_GROUPED))
def test_a_mutation_among_experts_is_caught(name, monkeypatch):
    old, new, options = GROUPED_MUTATIONS[name]
    weights, e2m1 = stack(3, **{"n": 64, "group": 64, "zeros": True, **options}), options.get("e2m1", False)
    ids = jnp.asarray([0, 2, 2, 1])
    x = operands(rows=4, k=weights[0].shape[2])[0]
    assert_each_close(by_expert(x, ids, weights, e2m1=e2m1), x, ids, weights, e2m1=e2m1)
    mutated(monkeypatch, old, new)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        assert_each_close(by_expert(x, ids, weights, e2m1=e2m1), x, ids, weights, e2m1=e2m1)


def test_refuses_what_it_cannot_do():
    x, weights, scales, _ = operands()
    with pytest.raises(ValueError, match="does not divide"):
        launch.matmul(x, weights, scales, tiles=Tiles(4))
    with pytest.raises(ValueError, match="shared memory"):
        launch.matmul(jnp.zeros((64, 512), jnp.bfloat16), weights, scales, tiles=Tiles(2, 256, 8))
    with pytest.raises(ValueError, match="2 consumers have the registers for 72 rows"):
        launch.matmul(jnp.zeros((72, 512), jnp.bfloat16), *operands(n=256)[1:3], tiles=Tiles(4))
    with pytest.raises(ValueError, match="multiples of 128 can be copied"):
        launch.matmul(*operands(n=64, group=128, zeros=True), tiles=TINY)
    with pytest.raises(ValueError, match="splits are of multiples of 256"):
        launch.matmul(x, weights, scales, tiles=Tiles(2, splits=3))
    with pytest.raises(ValueError, match="int4 of uint8 times bfloat16"):
        launch.matmul(x, weights, scales, e2m1=True)
    with pytest.raises(ValueError, match="tile of its own"):
        launch.matmul_tiles(x[None], *stack(1, k=512), group(jnp.zeros(3, jnp.int32), 1, 3)._replace(experts=None))
    for wrong in ({"depth": 32}, {"consumers": 5}, {"splits": 9}, {"stages": 0}, {"blocks": 0}):
        with pytest.raises(ValueError, match=r"there|consumers"):
            Tiles(**wrong)
