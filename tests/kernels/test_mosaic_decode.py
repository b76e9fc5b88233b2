"""The Mosaic GPU decode kernel, interpreted on the CPU. What compiles it to machine code: test_check.py."""

import inspect
import linecache

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.paged_attention.mosaic import Tiles, paged_decode_mosaic
from tools.gpu_check.reference import Case, float64_decode, poisoned_case

# Half an ulp of the result, and as much for the probabilities' rounding before they meet the values.
TOLERANCE = {jnp.bfloat16: 8e-3, jnp.float16: 1e-3}


def make_case(*, lengths, page=16, dtype=jnp.bfloat16, **options):
    return poisoned_case(lengths, page=page, dtype=dtype, **options)


def decode(case, tiles):
    arguments = [jnp.asarray(array) for array in case]
    scale = case.q.shape[-1] ** -0.5
    return compat.interpreted(
        lambda: paged_decode_mosaic(*arguments, scale=scale, tiles=tiles, interpret=compat.interpret_params())
    )


CASES = {
    "page16": ({"lengths": (37, 0, 150), "page": 16}, Tiles(stages=2, keys_per_split=64)),
    "page64": (
        {"lengths": (64, 129), "page": 64, "head_dim": 128, "group": 8, "kv_heads": 1},
        Tiles(keys_per_split=128),
    ),
    "one slot": ({"lengths": (200,), "page": 16, "group": 1}, Tiles(stages=1, keys_per_split=256)),
    "block128": ({"lengths": (1, 130), "page": 64, "group": 5}, Tiles(block_keys=128, stages=2, keys_per_split=128)),
    "float16": ({"lengths": (90,), "page": 16, "dtype": jnp.float16}, Tiles(stages=2, keys_per_split=64)),
    "odd width": ({"lengths": (75,), "page": 16, "width": 5, "spread": 30.0}, Tiles(stages=2, keys_per_split=64)),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name):
    options, tiles = CASES[name]
    case = make_case(**options)
    expected = float64_decode(case, case.q.shape[-1] ** -0.5)
    got = np.asarray(decode(case, tiles), np.float64)
    np.testing.assert_allclose(got, expected, atol=TOLERANCE[options.get("dtype", jnp.bfloat16)], rtol=8e-3)
    assert not got[case.lengths == 0].any()


def test_neighbours_and_table_width_change_no_bit():
    """250 keys are split after 128 whatever the table: splitting by length or by width would group them differently."""
    tiles = Tiles(stages=2, keys_per_split=128)
    q, pool, tables, lengths = make_case(lengths=(250, 40), width=33, kv_heads=1)
    together = np.asarray(decode(Case(q, pool, tables, lengths), tiles))
    alone = np.asarray(decode(Case(q[:1], pool, tables[:1, :16], lengths[:1]), tiles))
    assert together[:1].tobytes() == alone.tobytes()


@pytest.mark.parametrize("barrier", ["keys_ready", "values_ready", "slot_free"])
def test_a_missing_wait_is_caught(monkeypatch, barrier):
    """Race detection guards these barriers. It is blind to ``query_ready``: waiting for a later copy hides it."""
    wait, skipped = plgpu.barrier_wait, []

    def wait_unless_chosen(ref):
        caller = inspect.currentframe().f_back
        if barrier in linecache.getline(caller.f_code.co_filename, caller.f_lineno):
            skipped.append(ref)
        else:
            wait(ref)

    monkeypatch.setattr(plgpu, "barrier_wait", wait_unless_chosen)
    with pytest.raises(Exception, match=r"(?i)race|barrier"):
        decode(make_case(lengths=(200,)), Tiles(stages=1, keys_per_split=256))
    assert skipped


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 80}, "head_dim 80"),
        ({"dtype": jnp.float32}, "float32"),
        ({"page": 24}, "page size 24"),
        ({"group": 65}, "at most 64"),
    ],
)
def test_refuses_what_it_cannot_do(change, message):
    with pytest.raises(ValueError, match=message):
        decode(make_case(lengths=(8,), **change), Tiles())


def test_refuses_tiles_that_do_not_fit():
    with pytest.raises(ValueError, match="keys_per_split"):
        Tiles(keys_per_split=100)
