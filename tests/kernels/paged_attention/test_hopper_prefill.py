"""The Mosaic GPU prefill kernel without a GPU: interpreted on the CPU against float64, with race detection.

Mutations that these tests catch, each in its own test below: a missing wait for keys, for values, for a free slot, for
the raw values of a quantised pool; a causal mask that shows one key too many; no mask; stale page contents of other
sequences not cleared; pages of another KV head; the wrong page; an output that is not rescaled.
"""

import dataclasses
import inspect
import linecache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.check.cases import attention_case
from pallas_kernels.paged_attention import AttentionOptions
from pallas_kernels.paged_attention.hopper.prefill import consumer, producer, types
from pallas_kernels.paged_attention.hopper.prefill import launch as module
from pallas_kernels.paged_attention.hopper.prefill.launch import Tiles, heuristic_tiles, prefill, refusal

INT8, FP8, FP16 = jnp.int8, jnp.float8_e4m3fn, jnp.float16


# NaN in keys of other sequences, before the mask.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")


def run(case, tiles):
    return np.asarray(
        compat.interpreted(
            lambda: prefill(*case.arrays, case.options, tiles=tiles, interpret=compat.interpret_params())
        )
    )


def real_queries(case):
    return case.starts[:, None] + np.arange(case.q.shape[1]) < case.lengths[:, None]


def assert_close(case, got):
    """Bound the error beyond the rounding of the result and that of the probabilities to 16 bits before the PV product.

    The latter is of random sign and adds some 1e-3 of a row (2**-9 / sqrt(3), less what averages out) to bfloat16.
    """
    expected, got = case.expected(), np.asarray(got, np.float64)
    assert np.isfinite(got).all()
    assert not got[~real_queries(case)].any()
    rounding = np.asarray(jnp.asarray(expected).astype(case.q.dtype), np.float64) - expected
    bound, worst = (2e-2, 4e-2) if case.pool.dtype.itemsize == 1 else (1e-3, 6e-3)
    unit = 1 if case.q.dtype == jnp.bfloat16 or case.pool.dtype.itemsize == 1 else 1 / 8
    size = np.linalg.norm
    assert size(got - expected) <= size(rounding) + bound * unit * size(expected)
    rows = size(got - expected, axis=-1) / np.maximum(size(expected, axis=-1), 1e-30)
    assert rows[real_queries(case)].max(initial=0) <= worst * unit


TOKEN = {"scales": "token"}
FAST = {
    "sequences of all kinds": (Tiles(64, 2, 4), {"lengths": (70, 0, 1, 48), "counts": (24, 0, 1, 16), "chunk": 32}),
    "block 128, one head": (
        Tiles(128, 2, 1),
        {"lengths": (330,), "counts": (128,), "group": 1, "kv_heads": 1, "page": 128, "head_dim": 128},
    ),
    "window, softcap, sinks": (
        Tiles(64, 2, 2),
        {"lengths": (255,), "counts": (64,), "group": 2, "page": 32, "window": 70, "softcap": 20.0, "sinks": True},
    ),
    "window of one, sharp": (
        Tiles(64, 3, 8),
        {"lengths": (65,), "counts": (16,), "group": 8, "kv_heads": 1, "window": 1, "spread": 30.0, "sinks": True},
    ),
    "fp16, head_dim 96": (
        Tiles(64, 2, 4),
        {"lengths": (159,), "counts": (30,), "chunk": 32, "kv_heads": 1, "head_dim": 96, "dtype": FP16, "softcap": 5.0},
    ),
    "head_dim 256": (
        Tiles(64, 2, 8),
        {"lengths": (128,), "counts": (16,), "group": 8, "kv_heads": 1, "head_dim": 256, "page": 128},
    ),
    "int8 per head": (
        Tiles(64, 2, 4),
        {"lengths": (190,), "counts": (32,), "pool_dtype": INT8, "scales": "head", "window": 100, "kv_heads": 1},
    ),
    "int8 per token, head_dim 256": (
        Tiles(64, 2, 1),
        {"lengths": (130,), "counts": (8,), "group": 2, "kv_heads": 1, "head_dim": 256, "pool_dtype": INT8, **TOKEN},
    ),
    "fp8 per token": (
        Tiles(128, 2, 4),
        {"lengths": (300,), "counts": (32,), "pool_dtype": FP8, "scales": "token", "page": 64, "kv_heads": 1},
    ),
    "tree": (
        Tiles(64, 2, 4),
        {"lengths": (127, 33), "counts": (24, 32), "chunk": 32, "kv_heads": 1, "tree": True, "sinks": True},
    ),
    "tree and window": (
        Tiles(64, 2, 16),
        {"lengths": (140,), "counts": (8,), "group": 16, "kv_heads": 1, "tree": True, "window": 60},
    ),
}


@pytest.mark.parametrize("name", FAST)
def test_equals_float64(name):
    tiles, options = FAST[name]
    case = attention_case(**options)
    assert_close(case, run(case, tiles))


SLOW = {
    f"{page}-{dim}-{group}-{length}": (
        Tiles(block, stages, heads),
        {
            "lengths": (length, 17),
            "counts": (min(length, 40), 17),
            "chunk": 48,
            "page": page,
            "head_dim": dim,
            "group": group,
            "kv_heads": 1 + index % 2,
            "dtype": (jnp.bfloat16, FP16)[index % 3 == 1],
            **extra,
        },
    )
    for index, (page, dim, group, block, stages, heads, length, extra) in enumerate(
        [
            (16, 64, 1, 64, 2, 1, 63, {}),
            (16, 128, 5, 128, 2, 1, 129, {"window": 33}),
            (16, 256, 8, 64, 2, 8, 200, {"softcap": 30.0, "sinks": True}),
            (32, 80, 4, 128, 3, 4, 128, {"pool_dtype": INT8, "scales": "token"}),
            (32, 96, 16, 64, 4, 16, 65, {"pool_dtype": FP8, "scales": "head", "window": 20}),
            (32, 64, 7, 64, 2, 1, 256, {"tree": True, "softcap": 10.0}),
            (64, 128, 8, 64, 3, 4, 191, {"pool_dtype": INT8, "scales": "head", "tree": True}),
            (64, 64, 2, 128, 4, 2, 64, {"pool_dtype": FP8, "scales": "token", "softcap": 30.0, "sinks": True}),
            (64, 96, 3, 128, 2, 1, 257, {"window": 64, "sinks": True}),
            (128, 80, 6, 64, 2, 2, 127, {"window": 128, "tree": True}),
            (128, 128, 4, 128, 2, 2, 385, {"softcap": 20.0, "spread": 10.0}),
            (128, 64, 16, 128, 2, 8, 255, {"pool_dtype": INT8, "window": 1}),
            (16, 96, 2, 128, 2, 2, 16, {"pool_dtype": FP8, "scales": "head", "sinks": True}),
            (128, 256, 1, 64, 2, 1, 130, {"window": 90}),
            (16, 256, 2, 64, 2, 1, 190, {"pool_dtype": FP8, "scales": "token", "window": 100, "softcap": 20.0}),
            (64, 256, 4, 64, 2, 1, 140, {"pool_dtype": INT8, "scales": "head", "sinks": True}),
        ]
    )
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_equals_float64_further(name):
    tiles, options = SLOW[name]
    case = attention_case(**options)
    assert_close(case, run(case, tiles))


def test_no_bit_depends_on_sequence_table_pages_or_chunk():
    """The second sequence alone, with a wider table, other pages, and with queries from the second tile on.

    Only by whole tiles may queries move here: numpy's products, unlike wgmma's, depend on the row index in the matrix.
    """
    tiles = Tiles(64, 2, 4)
    case = attention_case((40, 150), counts=(16, 40), chunk=48, kv_heads=1, window=90, sinks=True, seed=3)
    together = run(case, tiles)[1]
    order = np.random.default_rng(5).permutation(len(case.pool))
    table = np.where(case.tables[1:] < len(order), np.argsort(order)[np.clip(case.tables[1:], 0, len(order) - 1)], -1)
    table = np.pad(table, ((0, 0), (0, 9)), constant_values=10**6)
    alone = dataclasses.replace(
        case, q=case.q[1:], pool=case.pool[order], tables=table, lengths=case.lengths[1:], starts=case.starts[1:]
    )
    assert run(alone, tiles)[0].tobytes() == together.tobytes()
    padded = np.pad(case.q[1:, 32:], ((0, 0), (0, 16), (0, 0), (0, 0)))
    later = dataclasses.replace(alone, q=padded, starts=case.starts[1:] + np.int32(32))
    assert run(later, tiles)[0, :8].tobytes() == together[32:40].tobytes()


# --------------------------------------------------------------------------------------------------------------
# Mutations.


def skip_waits(monkeypatch, line):
    """Leave out the waits whose source line contains ``line``."""
    wait, skipped = plgpu.barrier_wait, []

    def wait_unless_chosen(ref):
        caller = inspect.currentframe().f_back
        if line in linecache.getline(caller.f_code.co_filename, caller.f_lineno):
            skipped.append(ref)
        else:
            wait(ref)

    monkeypatch.setattr(plgpu, "barrier_wait", wait_unless_chosen)
    return skipped


SMALL = {"counts": (8,), "group": 16, "kv_heads": 1}


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("keys_ready.at", {"lengths": (200,)}),
        pytest.param("values_ready.at", {"lengths": (200,)}, marks=pytest.mark.slow),
        pytest.param("barrier_wait(free)", {"lengths": (250,)}, marks=pytest.mark.slow),
        ("barrier_wait(raw_ready)", {"lengths": (40,), "pool_dtype": FP8}),
    ],
)
def test_a_missing_wait_is_caught(monkeypatch, line, options):
    """Race detection guards these waits. It does not detect a missing wait for ``query_ready`` or ``last_clean``."""
    skipped = skip_waits(monkeypatch, line)
    case = attention_case(**options, **SMALL)
    with pytest.raises(Exception, match=r"(?i)race|barrier"):
        run(case, Tiles(64, 2, 16))
    assert skipped


def one_key_too_many(monkeypatch):
    tokens = consumer.Rows.tokens
    monkeypatch.setattr(consumer.Rows, "tokens", lambda self: tokens(self) + 1)


def no_mask(monkeypatch):
    monkeypatch.setattr(consumer, "_is_edge", lambda *_: jnp.bool_(False))


def no_clearing(monkeypatch):
    monkeypatch.setattr(consumer, "_clear_unseen", lambda *_: None)


def wrong_page(monkeypatch):
    sources = producer._sources
    monkeypatch.setattr(producer, "_sources", lambda *a: sources(*a)[::-1])


def wrong_head(monkeypatch):
    tile = types.this_tile
    monkeypatch.setattr(module, "this_tile", lambda *a: tile(*a)._replace(kv_head=jnp.int32(1)))


def no_rescaling(monkeypatch):
    fold = consumer._fold
    monkeypatch.setattr(consumer, "_fold", lambda *a: (s := fold(*a))._replace(shrink=jnp.ones_like(s.shrink)))


SLOWER = [pytest.param(mutate, marks=pytest.mark.slow) for mutate in (no_mask, wrong_head)]


@pytest.mark.parametrize("mutate", [one_key_too_many, no_clearing, wrong_page, no_rescaling, *SLOWER])
def test_a_mutation_is_caught(monkeypatch, mutate):
    mutate(monkeypatch)
    kv_heads = 2 if mutate is wrong_head else 1
    case = attention_case((100,), counts=(7,), chunk=8, group=16, kv_heads=kv_heads, spread=3.0)
    with pytest.raises(AssertionError):
        assert_close(case, run(case, Tiles(64, 2, 16)))


# --------------------------------------------------------------------------------------------------------------
# Rejected operands, and block sizes.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 72}, "head_dim 72"),
        ({"dtype": jnp.float32}, "float32"),
        ({"page": 24}, "page size 24"),
        ({"pool_dtype": jnp.float16}, "the pool is float16"),
        ({"window": 0}, "must be positive"),
        ({"scale": -1.0}, "must be positive"),
    ],
)
def test_refuses_what_it_cannot_do(change, message):
    case = attention_case((8,), counts=(8,), **change)
    assert message in refusal(case.arrays, case.options)
    with pytest.raises(ValueError, match=message):
        prefill(*case.arrays, case.options)


def test_refuses_by_shapes_alone():
    case = attention_case((8,), counts=(8,), group=3, page=64)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.arrays)
    assert refusal(shapes, AttentionOptions(1.0)) is None
    assert "do not divide" in refusal(shapes, AttentionOptions(1.0), Tiles(heads=2))
    assert "shared memory" in refusal(shapes, AttentionOptions(1.0), Tiles(stages=9))
    case = attention_case((8,), counts=(8,), group=2, head_dim=256, pool_dtype=INT8, scales="token", page=64)
    for heads, why in ((1, "None"), (2, "registers would spill")):
        assert why in str(refusal(case.arrays, case.options, Tiles(64, 2, heads)))
    assert "sinks" in refusal(shapes, AttentionOptions(1.0, sinks=jnp.zeros(2)))
    assert "tree" in refusal(shapes, AttentionOptions(1.0, tree=jnp.zeros((1, 4, 4), bool)))
    assert "scales" in refusal(shapes, AttentionOptions(1.0, scales=jnp.zeros((1, 2, 2))))


def test_tiles():
    with pytest.raises(ValueError, match="block_keys"):
        Tiles(block_keys=96)
    assert heuristic_tiles(group=4, head_dim=128, tree=False) == Tiles(128, 2, 4)
    assert heuristic_tiles(group=7, head_dim=256, tree=False) == Tiles(64, 2, 1)
    assert heuristic_tiles(group=8, head_dim=256, tree=False, quantized=True) == Tiles(64, 2, 1)
