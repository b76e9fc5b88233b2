"""Paged decode below Hopper, interpreted on the CPU with stand-ins for `mma` and asynchronous copies."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat, paged_attention
from pallas_kernels.check.cases import attention_case
from pallas_kernels.choice import Target
from pallas_kernels.paged_attention.mosaic import ampere
from pallas_kernels.paged_attention.mosaic.ampere import Tiles
from tests.kernels.test_mosaic_decode import assert_close

TINY = Tiles(stages=2, keys_per_split=64)


def run(case, tiles, decode=ampere.decode):
    options = {**case.options, "tiles": tiles, "interpret": compat.interpret_params()}
    return np.asarray(compat.interpreted(lambda: decode(*case.arrays, **options)))


CASES = {
    "splits, window, sinks, softcap": (
        TINY,
        {"lengths": (150, 0, 37), "page": 32, "window": 70, "sinks": True, "softcap": 9.0, "kv_heads": 1, "group": 3},
    ),
}
SLOW = {
    "plain": (TINY, {"lengths": (37, 0, 130), "page": 32}),
    "dim 128, page 16": (Tiles(3, 128), {"lengths": (129, 16), "head_dim": 128, "kv_heads": 1}),
    "page 128, float16, a wide group": (
        Tiles(4, 256),
        {"lengths": (200, 128), "page": 128, "group": 17, "kv_heads": 1, "dtype": jnp.float16, "spread": 30.0},
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES | SLOW]
)
def test_equals_float64(name):
    tiles, options = (CASES | SLOW)[name]
    case = attention_case(**options)
    assert_close(case, run(case, tiles))


@pytest.mark.slow
def test_no_bit_of_a_row_depends_on_its_neighbours():
    case = attention_case((100, 70), page=32, kv_heads=1)
    whole, arrays = run(case, TINY), list(case.arrays)
    arrays[0], arrays[2], arrays[3] = arrays[0][1:], arrays[2][1:], arrays[3][1:]
    options = {**case.options, "tiles": TINY, "interpret": compat.interpret_params()}
    alone = np.asarray(compat.interpreted(lambda: ampere.decode(*arrays, **options)))
    assert alone[0].tobytes() == whole[1].tobytes()


# What to change, where, and what must fail then.
MUTATIONS = {
    "the mask's end": ("(at < unit.high), scores", "(at <= unit.high), scores"),
    "a window's start": ("(at >= unit.low) & (at < unit.high), scores", "(at < unit.high), scores"),
    "values of unseen keys": ("(key < unit.low) | (key + BLOCK > unit.high)", "key < 0"),
    "keys and values": ("enumerate((smem.keys, smem.values))", "enumerate((smem.values, smem.keys))"),
    "a page's place": ("pl.multiple_of(lax.rem(key, jnp.int32(shape.page)), shape.piece)", "pl.multiple_of(0, 16)"),
    "a slot": ("lax.rem(jnp.asarray(index, jnp.int32), jnp.int32(shape.tiles.stages))", "jnp.int32(0)"),
    "rescaling": ("mixed = sums.mixed * _across(shrink, shape.head_dim)", "mixed = sums.mixed"),
    "a split's share": ("(sums * shares[:, :, :, None]).sum", "sums.sum"),
    "sinks": ("total = total + jnp.exp2(sinks - top)", "pass"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught(name):
    old, new = MUTATIONS[name]
    source = inspect.getsource(ampere)
    assert source.count(old) == 1, source.count(old)
    mutant = dict(ampere.__dict__)
    exec(compile(source.replace(old, new), ampere.__file__, "exec"), mutant)
    lengths, spread = ((3, 1), 1.0) if name == "sinks" else ((300, 37), 4.0)
    case = attention_case(lengths, page=128, window=240, sinks=True, kv_heads=1, spread=spread)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_close(case, run(case, mutant["Tiles"](2, 128), mutant["decode"]))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"head_dim": 80}, "head_dim 80"),
        ({"page": 16}, "pages of 16"),
        ({"group": 33}, "33 heads"),
        ({"dtype": jnp.float32}, "float32"),
        ({"pool_dtype": jnp.int8, "scales": "head"}, "int8"),
    ],
)
def test_what_it_refuses_takes_xla(options, why):
    case = attention_case((5,), **{"page": 32, **options})
    extra = {name: case.options[name] for name in ("window", "softcap", "sinks", "scales")}
    for capability in ((8, 0), (8, 9)):
        chosen = paged_attention.explain_decode(*case.arrays, **extra, target=Target("gpu", capability))
        assert (chosen.path, why in chosen.why) == ("xla", True), chosen


def test_which_kernel_a_gpu_takes():
    case = attention_case((5,), page=32)
    for capability, path in (
        ((8, 0), "mosaic"),
        ((8, 9), "mosaic"),
        ((9, 0), "mosaic"),
        ((7, 5), "xla"),
        ((10, 0), "xla"),
    ):
        chosen = paged_attention.explain_decode(*case.arrays, target=Target("gpu", capability))
        assert chosen.path == path, chosen


def test_tiles_of_impossible_numbers_are_refused():
    for fields in ({"stages": 1}, {"stages": 5}, {"keys_per_split": 65}, {"keys_per_split": 0}):
        with pytest.raises(ValueError, match="stages"):
            Tiles(**fields)
    with pytest.raises(ValueError, match="window"):
        ampere.decode(*attention_case((5,), page=32).arrays, scale=1.0, window=0)
