"""The Mosaic GPU kernel of quant_matmul, interpreted on the CPU. What compiles it to machine code: test_check.py."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.quant_matmul import mosaic
from pallas_kernels.quant_matmul.mosaic import Tiles
from tests.kernels.quant_cases import assert_close, operands

FP16, FP8, INT8 = jnp.float16, jnp.float8_e4m3fn, jnp.int8
TINY = Tiles(consumers=1, depth=128, stages=2)


def run(arrays, tiles=None, matmul=mosaic.matmul):
    product = jax.jit(lambda *a: matmul(*a, tiles=tiles, interpret=compat.interpret_params()))
    return compat.interpreted(lambda: product(*arrays))


CASES = {
    "int4": ({"rows": 3}, Tiles(2, 256, 2)),
    "int4, zeros, uneven splits": (
        {"rows": 9, "k": 768, "zeros": True, "scale_dtype": jnp.float32},
        Tiles(2, 256, 3, splits=2),
    ),
    "int4, float16, group 64": ({"rows": 8, "n": 64, "group": 64, "x_dtype": FP16, "scale_dtype": FP16}, TINY),
    "int8, group over steps": ({"rows": 16, "n": 64, "group": 256, "dtype": INT8, "zeros": True}, TINY),
    "int8, channel": ({"n": 256, "group": None, "dtype": INT8, "x_dtype": FP16}, Tiles(4, 128, 1)),
    "fp8, channel, splits": ({"n": 64, "group": None, "dtype": FP8}, Tiles(1, 128, 2, splits=3)),
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


def test_other_rows_change_no_bit():
    """Neither their numbers, NaN among them, nor their count within one program."""
    x, *rest = operands(rows=16, k=256, n=64)
    foreign = x.at[jnp.arange(16) != 5].set(jnp.nan)
    tiles = Tiles(1, 128, 2, splits=2)
    whole, alone = (np.asarray(run((rows, *rest), tiles)) for rows in (x, foreign[3:]))
    assert whole[5].tobytes() == alone[2].tobytes()
    assert np.isnan(alone[[0, 1, 3, 12]].astype(np.float32)).all()


# What to change, where, and what must fail then.
MUTATIONS = {
    "wait for copies": ("plgpu.barrier_wait(barriers.ready.at[slot])", "pass", {}),
    "wait for a free slot": ("pl.when(index >= stages)(functools.partial(await_free, index))", "pass", {}),
    "a group's scale": ("_factors(smem.scales, slot, group, own)", "_factors(smem.scales, slot, 0, own)", {}),
    "a group's zero": ("_factors(smem.zeros, slot, group, own)", "_factors(smem.zeros, slot, 0, own)", {}),
    "a step's groups": ("lax.div(start, jnp.int32(shape.group))", "lax.div(start, jnp.int32(depth))", {}),
    "a block's channels": ("pl.ds(unit.channel, ", "pl.ds(unit.channel * 0, ", {"n": 256}),
    "a consumer's channels": ("pl.multiple_of(warpgroup * CHANNELS", "pl.multiple_of(warpgroup * 0", {}),
    "a split's first step": ("first = lax.div(split * shape.steps", "first = lax.div(0 * shape.steps", {}),
    "a group's inputs": ("pl.ds(inputs[0], shape.span)", "pl.ds(0, shape.span)", {}),
}
FAST_MUTATIONS = ("wait for copies", "a step's groups")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST_MUTATIONS else pytest.mark.slow) for name in MUTATIONS]
)
def test_a_mutation_is_caught(name):
    old, new, options = MUTATIONS[name]
    source = inspect.getsource(mosaic)
    assert source.count(old) == 1, source.count(old)
    mutant = dict(mosaic.__dict__)
    exec(compile(source.replace(old, new), mosaic.__file__, "exec"), mutant)
    arrays = operands(**{"rows": 8, "n": 128, "k": 1024, "group": 64, "zeros": True, **options})
    tiles = mutant["Tiles"](2, 128, 1, splits=2)
    assert_close(run(arrays, Tiles(2, 128, 1, splits=2)), arrays)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        assert_close(run(arrays, tiles, mutant["matmul"]), arrays)


def test_refuses_what_it_cannot_do():
    x, weights, scales, _ = operands()
    with pytest.raises(ValueError, match="does not divide"):
        mosaic.matmul(x, weights, scales, tiles=Tiles(4))
    with pytest.raises(ValueError, match="shared memory"):
        mosaic.matmul(jnp.zeros((64, 512), jnp.bfloat16), weights, scales, tiles=Tiles(2, 256, 8))
    for wrong in ({"depth": 64}, {"consumers": 3}, {"splits": 9}, {"stages": 0}):
        with pytest.raises(ValueError, match=r"there|consumers"):
            Tiles(**wrong)
