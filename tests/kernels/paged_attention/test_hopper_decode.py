"""The Mosaic GPU decode kernel, interpreted on the CPU. test_check.py compiles it to machine code.

Mutations, each of which must be caught (`MUTATIONS` and `test_a_missing_wait_is_caught`): a removed wait at each of
the barriers that race detection guards; off by one at the mask's end, at its start (window), in a chunk's causal bound
and in a tree's bits; values of unseen keys not cleared; a wrong page offset in a block; keys and values swapped; the
scale of another page; a split skipped in the merge; sums of a cut head read from another head's slots; sums of an uncut
head read from the wrong slot; sinks omitted; a wrong head offset in the tile.
"""

import dataclasses
import inspect
import linecache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.check.cases import Case, attention_case
from pallas_kernels.paged_attention import AttentionOptions
from pallas_kernels.paged_attention.hopper.decode import consumer, producer, schedule, slots
from pallas_kernels.paged_attention.hopper.decode import launch as kernel
from pallas_kernels.paged_attention.hopper.decode.launch import Tiles, heuristic_tiles, refusal
from pallas_kernels.paged_attention.spans import span

INT8, FP8 = jnp.int8, jnp.float8_e4m3fn
TINY = Tiles(stages=2, keys_per_split=64, blocks=3)
ONE = Tiles(stages=2, keys_per_split=256, blocks=1)


def run(case: Case, tiles: Tiles) -> np.ndarray:
    op = kernel.decode if case.starts is None else kernel.extend
    how = {"tiles": tiles, "interpret": compat.interpret_params()}
    return np.asarray(compat.interpreted(lambda: op(*case.arrays, case.options, **how)))


def assert_close(case: Case, got: np.ndarray) -> None:
    """Check that the relative error is at most 1e-3 beyond the rounding of the result, and per value a few half ulps.

    Half an ulp of bfloat16 is 2e-3 alone, so each value may be off by its own half ulp before its error counts.
    Quantised pools are compared with their dequantised values, and have no larger bound.
    """
    exact, real = case.expected(), np.ones(got.shape[:1], bool)
    if case.starts is not None:
        real = case.starts[:, None] + np.arange(got.shape[1]) < case.lengths[:, None]
    assert np.isfinite(got.astype(np.float32)).all()
    assert not got[case.lengths == 0].any()
    number, exact = got.astype(np.float64)[real], exact[real]
    half_ulp = float(jnp.finfo(got.dtype).eps) / 2
    excess = np.maximum(np.abs(number - exact) - half_ulp * np.abs(exact), 0)
    assert np.linalg.norm(excess) <= 1e-3 * np.linalg.norm(exact)
    np.testing.assert_allclose(number, exact, rtol=8 * half_ulp, atol=6 * half_ulp * np.abs(exact).max())


# Every case has odd lengths and tables: empty rows, one key, a page boundary, one key short of it, full tables.
CASES = {
    "plain": (TINY, {"lengths": (37, 0, 150)}),
    "page 64, dim 128": (TINY, {"lengths": (64, 129), "page": 64, "head_dim": 128, "group": 8, "kv_heads": 1}),
    "seven to a group": (ONE, {"lengths": (70,), "group": 7, "page": 32, "spread": 30.0, "sinks": True}),
    "sixteen, block 128": (
        Tiles(block_keys=128, stages=1, keys_per_split=128, blocks=2),
        {"lengths": (200, 128), "page": 128, "group": 16, "kv_heads": 1, "softcap": 5.0, "scale": 0.3},
    ),
    "dim 80": (ONE, {"lengths": (40, 3), "head_dim": 80, "group": 3, "window": 20}),
    "dim 256": (TINY, {"lengths": (70, 20), "head_dim": 256, "kv_heads": 1, "group": 2, "softcap": 20.0}),
    "window": (TINY, {"lengths": (200, 30), "window": 70, "sinks": True, "kv_heads": 1}),
    "int8 per head": (TINY, {"lengths": (100, 0), "pool_dtype": INT8, "scales": "head", "kv_heads": 1}),
    "int8 per token": (ONE, {"lengths": (50,), "page": 32, "pool_dtype": INT8, "scales": "token", "window": 33}),
    "int8 per token, page 16, dim 80": (
        TINY,
        {"lengths": (100, 17), "pool_dtype": INT8, "scales": "token", "head_dim": 80, "kv_heads": 2, "width": 9},
    ),
    "chunk": (TINY, {"lengths": (70, 0, 66), "counts": (4, 0, 2), "chunk": 4, "group": 2, "kv_heads": 2}),
    "tree": (ONE, {"lengths": (40, 8), "counts": (8, 8), "group": 1, "tree": True}),
    "tree, window, fp8": (
        TINY,
        {"lengths": (130,), "counts": (6,), "tree": True, "window": 66, "pool_dtype": FP8, "scales": "token"}
        | {"page": 64, "kv_heads": 1, "group": 2, "softcap": 9.0},
    ),
}
SLOW = {
    "edges, one head a group": (TINY, {"lengths": (1, 15, 16, 17, 64), "group": 1, "width": 9}),
    "half a page a slot": (TINY, {"lengths": (190, 65), "page": 128, "kv_heads": 1, "window": 100}),
    "window of one": (TINY, {"lengths": (65,), "window": 1, "kv_heads": 1}),
    "fp8 per head": (
        ONE,
        {"lengths": (75,), "pool_dtype": FP8, "scales": "head", "dtype": jnp.float16, "head_dim": 128},
    ),
    "chunk, window, sinks": (
        TINY,
        {"lengths": (100,), "counts": (8,), "group": 4, "window": 20, "sinks": True, "kv_heads": 1},
    ),
    "dim 96, fp16": (TINY, {"lengths": (90,), "head_dim": 96, "page": 32, "dtype": jnp.float16, "sinks": True}),
    "fp8 per token, page 128": (
        Tiles(block_keys=128, stages=2, keys_per_split=256, blocks=2),
        {"lengths": (300,), "page": 128, "pool_dtype": FP8, "scales": "token", "head_dim": 128, "kv_heads": 1},
    ),
    "fp8 per head, dim 96": (ONE, {"lengths": (40, 70), "pool_dtype": FP8, "scales": "head", "head_dim": 96}),
    "fp8 per token, page 16, block 128": (
        Tiles(block_keys=128, stages=2, keys_per_split=128, blocks=2),
        {"lengths": (150, 3), "pool_dtype": FP8, "scales": "token", "group": 3, "window": 60, "kv_heads": 1},
    ),
    "int8, tree, dim 80": (
        TINY,
        {"lengths": (90,), "counts": (6,), "tree": True, "pool_dtype": INT8, "scales": "token", "head_dim": 80}
        | {"group": 2, "kv_heads": 1},
    ),
    "fp8 without scales": (TINY, {"lengths": (80,), "pool_dtype": FP8, "kv_heads": 1, "sinks": True}),
    "sixteen queries": (TINY, {"lengths": (100, 16), "counts": (16, 16), "group": 4, "kv_heads": 1, "head_dim": 128}),
    "a tree of 32": (TINY, {"lengths": (100,), "counts": (32,), "group": 1, "tree": True, "kv_heads": 2}),
    "many blocks": (Tiles(stages=3, keys_per_split=64, blocks=17), {"lengths": (300, 5, 0, 64), "group": 5}),
    "more blocks than units": (dataclasses.replace(TINY, blocks=9), {"lengths": (20,), "kv_heads": 1}),
    "one slot": (Tiles(stages=1, keys_per_split=128, blocks=2), {"lengths": (200,), "page": 64, "group": 6}),
    "int8, fp16, window": (
        TINY,
        {"lengths": (190, 64), "pool_dtype": INT8, "scales": "head", "dtype": jnp.float16, "window": 64, "page": 32},
    ),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_equals_float64(name):
    tiles, options = (CASES | SLOW)[name]
    if options.get("head_dim", 64) % 64 and not compat.CLIPPED_STORES:
        pytest.skip("needs JAX 0.12")
    case = attention_case(**options)
    assert_close(case, run(case, tiles))


def test_neighbours_pages_and_table_width_change_no_bit():
    """250 keys in splits of 64 are merged in one block, or by several blocks that exchange their sums."""
    case = attention_case((250, 40), width=20, kv_heads=1, sinks=True)
    together = run(case, TINY)
    order = np.random.default_rng(1).permutation(case.pool.shape[0])
    moved = np.empty_like(case.pool)
    moved[order] = case.pool
    tables = order[np.clip(case.tables[:1, :16], 0, case.pool.shape[0] - 1)].astype(np.int32)
    alone = dataclasses.replace(case, q=case.q[:1], pool=moved, tables=tables, lengths=case.lengths[:1])
    assert together[:1].tobytes() == run(alone, dataclasses.replace(TINY, blocks=1)).tobytes()


def test_the_number_of_blocks_changes_no_bit():
    """Sums of an int8 pool's uncut heads are also stored in memory: in all, in some and in no block."""
    case = attention_case((130, 70, 200), kv_heads=2, pool_dtype=INT8, scales="head")
    one, *others = (run(case, dataclasses.replace(TINY, blocks=blocks)).tobytes() for blocks in (1, 2, 17))
    assert all(other == one for other in others)


class _Hopper(jax.sharding.AbstractDevice):
    compute_capability = "9.0"


def test_all_blocks_share_the_semaphores():
    """Checked in the lowering, as the interpreter has none. With separate semaphores a block could wait forever."""
    case, tiles = attention_case((150, 70, 3), kv_heads=2), dataclasses.replace(TINY, blocks=7)
    hopper = _Hopper(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=hopper)):
        traced = jax.jit(lambda *arrays: kernel.decode(*arrays, AttentionOptions(1.0), tiles=tiles)).trace(*case.arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    call = next(line for line in text.splitlines() if "custom_call" in line and "mosaic" in line)
    types = call[call.rindex(" : (") :]
    assert f"tensor<{3 * 2}xi32>" in types
    assert f"tensor<{3 * 2 * 7}xi32>" not in types


@pytest.mark.parametrize(
    "barrier", ["keys_ready", *(pytest.param(name, marks=pytest.mark.slow) for name in ("values_ready", "slot_free"))]
)
def test_a_missing_wait_is_caught(monkeypatch, barrier):
    """Race detection guards these barriers, but not those of the queries: waiting for a later copy hides them."""
    wait, skipped = plgpu.barrier_wait, []

    def wait_unless_chosen(ref):
        caller = inspect.currentframe().f_back
        if barrier in linecache.getline(caller.f_code.co_filename, caller.f_lineno):
            skipped.append(ref)
        else:
            wait(ref)

    monkeypatch.setattr(plgpu, "barrier_wait", wait_unless_chosen)
    with pytest.raises(Exception, match=r"(?i)race|barrier"):
        run(attention_case((130,), kv_heads=1), Tiles(stages=1, keys_per_split=256, blocks=1))
    assert skipped


# Module, line, its replacement, and a case that must then fail.
MUTATIONS = {
    "mask's end": (consumer, "key < bounds.high", "key <= bounds.high", {"lengths": (37,)}),
    "mask's start": (consumer, "key >= bounds.low)", "key > bounds.low)", {"lengths": (37,), "window": 5}),
    "causal bound": (consumer, "jnp.minimum(at + 1, length)", "jnp.minimum(at + 2, length)", {"counts": (4,)}),
    "tree's bits": (consumer, "== 1)", "== 0)", {"counts": (4,), "tree": True}),
    "unseen values": (consumer, "_clear_unseen(shape, unit, values, at)", "pass", {"lengths": (37,)}),
    "place of a page": (producer, "pl.ds(index * shape.piece", "pl.ds((index ^ 1) * shape.piece", {}),
    "halves": (producer, "where, to = (piece.page, piece.half,", "where, to = (piece.page, 1 - piece.half,", {}),
    "a page's scale": (consumer, "gmem.scales[page, half,", "gmem.scales[page, 0,", {"scales": "head"}),
    "order of the merge": (consumer, "0, in_head, add", "0, in_head - 1, add", {}),
    "a cut head's slots": (consumer, "first_split, run.began)", "first_split, run.block)", {"kv_heads": 4}),
    "an uncut head's slots": (
        consumer,
        "uncut_slot(shape, head, split - 1",
        "uncut_slot(shape, head, split",
        {"lengths": (130, 70), "scales": "head"},
    ),
    "sinks": (consumer, "if not shape.options.sinks", "if True", {"sinks": True}),
    "offset in the tile": (consumer, "smem.output.at[pl.ds(offset,", "smem.output.at[pl.ds(offset * 0,", {}),
}
FAST_MUTATIONS = ("mask's end", "order of the merge", "a cut head's slots", "an uncut head's slots")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST_MUTATIONS else pytest.mark.slow) for name in MUTATIONS]
)
def test_a_mutation_is_caught(monkeypatch, name):
    module, old, new, options = MUTATIONS[name]
    source = inspect.getsource(module)
    assert source.count(old) == 1, source.count(old)
    mutant = dict(module.__dict__)
    exec(compile(source.replace(old, new), module.__file__, "exec"), mutant)
    entry = "consume" if module is consumer else "produce"
    monkeypatch.setattr(kernel, entry, mutant[entry])
    if "scales" in options:
        options = {**options, "pool_dtype": INT8}
    case = attention_case(**{"lengths": (140,), "kv_heads": 2, "group": 4, **options})
    with pytest.raises((AssertionError, RuntimeError)):
        assert_close(case, run(case, TINY))


def plan_of(starts, lengths, *, window, tiles, kv_heads):
    sizes = {"block_keys": tiles.block_keys, "keys_per_split": tiles.keys_per_split}
    spans = span(jnp.asarray(starts), jnp.asarray(lengths), **sizes, window=window)
    per_split = tiles.keys_per_split // tiles.block_keys
    plan = schedule.plan(spans, kv_heads=kv_heads, blocks=tiles.blocks, blocks_per_split=per_split)
    return jax.tree.map(np.asarray, spans), np.asarray(plan)


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("blocks", [1, 7, 264])
def test_the_plan_covers_every_unit_once_in_equal_shares(blocks, window):
    rng = np.random.default_rng(blocks)
    lengths = np.concatenate([rng.integers(0, 5000, 12), [0, 1, 64, 20000, 0]]).astype(np.int32)
    tiles, kv_heads = Tiles(blocks=blocks), 3
    starts = np.maximum(lengths - 1, 0)
    spans, (row, within, count, _) = plan_of(starts, lengths, window=window, tiles=tiles, kv_heads=kv_heads)
    in_head = spans.last_split - spans.first_split + 1
    before = np.concatenate([[0], np.cumsum(in_head * kv_heads)])
    first = before[row] + within
    busy = count > 0
    assert (first[busy] == np.concatenate([[0], np.cumsum(count[busy])])[:-1]).all()
    assert count.sum() == before[-1]
    cost = (np.sum(spans.end_block - spans.first_block) + in_head.sum()) * kv_heads
    units = np.concatenate([_costs(spans, i, kv_heads, 8) for i in range(len(lengths))])
    most = max(units[f : f + n].sum() for f, n in zip(first, count, strict=True))
    assert most <= cost / blocks + 2 * (8 + 1)


def shape_of(rows, keys, *, kv_heads, tiles, chunk=1, window=None, pool_dtype=jnp.bfloat16, head_dim=64):
    q = jax.ShapeDtypeStruct((rows, chunk, kv_heads * 4, head_dim), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((1, 2, kv_heads, 64, head_dim), pool_dtype)
    tables = jax.ShapeDtypeStruct((rows, keys // 64), jnp.int32)
    return kernel._shape_of(q, pool, tables, AttentionOptions(1.0, window=window), tiles, False)


def walk(shape, spans, plan):
    """Yield (block, head, split from the head's first one, run) for each unit, by the rules of `consume`."""
    in_head = np.repeat(spans.last_split - spans.first_split + 1, shape.kv_heads)
    units = [(head, split) for head, splits in enumerate(in_head) for split in range(splits)]
    before = np.concatenate([[0], np.cumsum(in_head)])[:: shape.kv_heads]
    for block, (row, within, count, began) in enumerate(plan.T.tolist()):
        mine = units[before[row] + within :][:count]
        for index, (head, split) in enumerate(mine):
            borrowed = mine[0][1] > 0 and head == mine[0][0]
            ends_here = in_head[head] - 1 - split < count - index
            yield block, head, split, consumer._Run(block, began if borrowed else block, borrowed, ends_here)


SIZES = {
    "rows": st.sampled_from([1, 2, 7]),
    "kv_heads": st.sampled_from([1, 3]),
    "blocks": st.sampled_from([1, 2, 3, 5, 16, 40]),
    "keys_per_split": st.sampled_from([64, 128]),
    "window": st.one_of(st.none(), st.integers(1, 400)),
    "chunk": st.sampled_from([1, 4]),
    "pool_dtype": st.sampled_from([jnp.bfloat16, INT8]),
}


@settings(deadline=None, max_examples=150)
@given(data=st.data(), **SIZES)
def test_no_two_sums_that_are_needed_share_a_slot(
    data, rows, kv_heads, blocks, keys_per_split, window, chunk, pool_dtype
):
    most = 1024
    lengths = np.asarray(data.draw(st.lists(st.integers(0, most), min_size=rows, max_size=rows)), np.int32)
    starts = np.maximum(lengths - data.draw(st.integers(1, chunk)), 0)
    tiles = Tiles(keys_per_split=keys_per_split, blocks=blocks)
    sizes = {"kv_heads": kv_heads, "tiles": tiles, "window": window}
    shape = shape_of(rows, most, chunk=chunk, pool_dtype=pool_dtype, **sizes)
    spans, plan = plan_of(starts, lengths, **sizes)
    assert slots.slots(shape) <= rows * kv_heads * shape.splits
    assert (spans.last_split - spans.first_split).max() < shape.splits
    lent, gathered, uncut = {}, {}, {}
    for block, head, split, run in walk(shape, spans, plan):
        if run.borrowed or not run.ends_here:
            lent[head, split] = slots.cut_slot(shape, head, split, run.began)
        elif shape.parks and shape.splits > 1:
            uncut.setdefault(slots.uncut_slot(shape, head, split, block), set()).add(block)
            assert slots.uncut_slot(shape, head, split, block) != slots.uncut_slot(shape, head, split + 1, block)
        if run.borrowed and run.ends_here:
            gathered |= {(head, each): slots.cut_slot(shape, head, each, plan[3, block]) for each in range(split + 1)}
    assert lent == gathered
    assert len({*lent.values(), *uncut}) == len(lent) + len(uncut)
    assert all(len(users) == 1 for users in uncut.values())
    assert all(0 <= slot < slots.slots(shape) for slot in (*lent.values(), *uncut))


def test_memory_for_sums_follows_from_the_blocks():
    """Llama-3.1 at 256 rows once took sums of 2,048 heads of 256 splits each; few heads take as much as then."""
    heads = {"kv_heads": 8, "head_dim": 128}
    assert slots.slots(shape_of(256, 131_072, tiles=Tiles(blocks=264), **heads)) == 263 * 256
    assert slots.slots(shape_of(256, 131_072, tiles=Tiles(blocks=264), pool_dtype=INT8, **heads)) == 263 * 256 + 2 * 264
    assert slots.slots(shape_of(256, 131_072, tiles=Tiles(blocks=264), window=1024, **heads)) == 263 * 3
    assert slots.slots(shape_of(4, 4096, tiles=Tiles(blocks=264), **heads)) == 4 * 8 * 8


def _costs(spans, row, kv_heads, per_split):
    splits = np.arange(spans.first_split[row], spans.last_split[row] + 1)
    low = np.maximum(splits * per_split, spans.first_block[row])
    high = np.minimum((splits + 1) * per_split, spans.end_block[row])
    return np.tile(np.maximum(high - low, 0) + 1, kv_heads)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 72}, "head_dim 72"),
        ({"dtype": jnp.float32}, "float32"),
        ({"page": 24}, "page size 24"),
        ({"group": 65}, "too many"),
        ({"pool_dtype": jnp.float16}, "neither alike"),
    ],
)
def test_refuses_what_it_cannot_do(change, message):
    case = attention_case(**{"lengths": (8,), **change})
    with pytest.raises(ValueError, match=message):
        run(case, TINY)


def test_refuses_tiles_that_do_not_fit():
    with pytest.raises(ValueError, match="keys_per_split"):
        Tiles(keys_per_split=100)
    case = attention_case((8,), page=128)
    assert "shared memory" in (refusal(case.arrays, case.options, Tiles(128, stages=20, keys_per_split=128)) or "")


@pytest.mark.parametrize("head_dim", kernel.HEAD_DIMS)
@pytest.mark.parametrize("queries", [1, 8, 64])
def test_heuristic_tiles_fit(head_dim, queries):
    for page in kernel.PAGES:
        for pool_dtype in (jnp.bfloat16, INT8):
            tiles = heuristic_tiles(head_dim, page, jnp.bfloat16, pool_dtype, queries=queries)
            q = jax.ShapeDtypeStruct((2, queries, 1, head_dim), jnp.bfloat16)
            pool = jax.ShapeDtypeStruct((4, 2, 1, page, head_dim), pool_dtype)
            tables, lengths = jax.ShapeDtypeStruct((2, 4), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
            why = refusal((q, pool, tables, lengths), AttentionOptions(1.0), tiles) or "quantised pool"
            assert any(words in why for words in ("quantised pool", "needs JAX", "too many")), why
            assert tiles.stages >= 2 or head_dim == 256
