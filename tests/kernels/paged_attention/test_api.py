"""The XLA path of paged attention against the equation in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from pallas_kernels.check.cases import attention_case
from pallas_kernels.choice import AMPERE, HOPPER, Target
from pallas_kernels.paged_attention import AttentionOptions, api, reference

SCALE = 0.3


def _pool(seed: int, pages: int, kv_heads: int, page: int, head_dim: int, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((pages, 2, kv_heads, page, head_dim), np.float32)).astype(dtype)


def _queries(seed: int, *shape: int):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


@pytest.mark.parametrize("window", [None, 1, 7, 70])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "page"), [(2, 3, 8, 16), (1, 4, 20, 64), (4, 1, 96, 32)])
def test_decode_equals_the_equation(kv_heads, group, head_dim, page, window):
    lengths = jnp.array([0, 1, page, page + 1, 150, 3 * page], jnp.int32)
    width = 160 // page + 1
    tables = jnp.asarray(np.random.default_rng(1).permutation(6 * width).reshape(6, width), jnp.int32)
    pool, q = _pool(2, 6 * width, kv_heads, page, head_dim), _queries(3, 6, kv_heads * group, head_dim)
    got = jax.jit(lambda *a: paged_attention.decode(*a, AttentionOptions(SCALE, window)))(q, pool, tables, lengths)
    want = reference.decode(q, pool, tables, lengths, AttentionOptions(SCALE, window))
    np.testing.assert_allclose(got, want, atol=2e-6, rtol=1e-5)
    assert not np.asarray(got[0]).any()


@pytest.mark.parametrize("window", [None, 5, 300])
@pytest.mark.parametrize("chunks", [[(0, 1)], [(0, 32), (256, 32), (0, 0)], [(448, 20), (64, 17)], [(37, 32), (3, 9)]])
def test_prefill_equals_the_equation(chunks, window):
    page, chunk, sequences = 32, 32, len(chunks)
    pool, q = _pool(2, 50, 2, page, 16), _queries(3, sequences, chunk, 6, 16)
    tables = jnp.asarray(np.random.default_rng(4).permutation(50)[: 15 * sequences].reshape(sequences, 15), jnp.int32)
    starts, ends = jnp.array([start for start, _ in chunks]), jnp.array([sum(pair) for pair in chunks])
    prefill = jax.jit(lambda *a: paged_attention.prefill(*a, AttentionOptions(SCALE, window)))
    got = prefill(q, pool, tables, starts, ends)
    want = reference.prefill(q, pool, tables, starts, ends, AttentionOptions(SCALE, window))
    for sequence, (_, count) in enumerate(chunks):
        np.testing.assert_allclose(got[sequence, :count], want[sequence, :count], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 5, 300])
def test_prefill_in_both_directions_equals_the_equation(window):
    """The second sequence is an image in the middle of a text, beyond the first block of keys."""
    page, chunk, starts, lengths = 32, 32, jnp.array([0, 250]), jnp.array([30, 282])
    pool, q = _pool(2, 30, 2, page, 16), _queries(3, 2, chunk, 6, 16)
    tables = jnp.asarray(np.random.default_rng(4).permutation(30).reshape(2, 15), jnp.int32)
    ends = np.asarray(starts)[:, None] + np.arange(chunk)
    ends[0, 3:20], ends[1, 2:30] = 19, 279
    options = AttentionOptions(SCALE, window, ends=jnp.asarray(ends))
    got = jax.jit(paged_attention.prefill)(q, pool, tables, starts, lengths, options)
    want = reference.prefill(q, pool, tables, starts, lengths, options)
    for sequence, count in enumerate((30, 32)):
        np.testing.assert_allclose(got[sequence, :count], want[sequence, :count], atol=2e-6, rtol=1e-5)


def test_a_chunk_does_not_depend_on_other_sequences():
    pool, q = _pool(5, 64, 2, 16, 8), _queries(6, 3, 16, 4, 8)
    tables = jnp.asarray(np.random.default_rng(7).permutation(64)[:48].reshape(3, 16), jnp.int32)
    prefill = jax.jit(lambda *a: paged_attention.prefill(*a, AttentionOptions(SCALE, 40)))
    together = prefill(q, pool, tables, jnp.array([48, 240, 0]), jnp.array([64, 256, 3]))
    alone = prefill(q, pool, tables, jnp.array([48, 0, 0]), jnp.array([64, 0, 0]))
    np.testing.assert_array_equal(together[0], alone[0])


def test_a_row_does_not_depend_on_table_width_or_neighbours():
    pool, q = _pool(5, 96, 2, 16, 8), _queries(6, 3, 4, 8)
    tables = jnp.asarray(np.random.default_rng(7).permutation(96).reshape(3, 32), jnp.int32)
    decode = jax.jit(lambda *a: paged_attention.decode(*a, AttentionOptions(SCALE, 40)))
    together = decode(q, pool, tables, jnp.array([270, 500, 3]))
    alone = decode(q, pool, tables[:, :17], jnp.array([270, 0, 0]))
    np.testing.assert_array_equal(together[0], alone[0])


@pytest.mark.parametrize(("rows", "heads", "head_dim", "keys"), [(1, 8, 128, 256), (8, 8, 128, 64), (40, 4, 64, 256)])
def test_blocks_stay_in_the_cache(rows, heads, head_dim, keys):
    """The lowered program shows the keys of one block: [rows, heads, keys, head_dim] in float32."""
    pool, q = jnp.zeros((600, 2, heads, 64, head_dim)), jnp.zeros((rows, heads, head_dim))
    decode = jax.jit(lambda *a: paged_attention.decode(*a, AttentionOptions(SCALE)))
    text = decode.lower(q, pool, jnp.zeros((rows, 8), jnp.int32), jnp.ones(rows, jnp.int32)).as_text()
    assert f"tensor<{min(rows, 8)}x{heads}x{keys}x{head_dim}xf32>" in text


def test_foreign_pages_do_not_matter():
    pool, q = _pool(5, 8, 2, 16, 8), _queries(6, 1, 4, 8)
    tables, lengths = jnp.array([[3, 5, 1]]), jnp.array([20])
    want = paged_attention.decode(q, pool, tables, lengths, AttentionOptions(SCALE))
    poisoned = pool.at[jnp.array([0, 1, 2, 4, 6, 7])].set(1e3).at[5, :, :, 4:].set(-1e3)
    got = paged_attention.decode(q, poisoned, tables, lengths, AttentionOptions(SCALE))
    np.testing.assert_array_equal(got, want)


OPTIONS = {
    "softcap": {"lengths": (37, 0, 150), "softcap": 5.0},
    "sinks": {"lengths": (37, 0, 150, 64, 1, 2, 3, 4, 5, 6), "sinks": True, "window": 9},
    "float8 per token": {"lengths": (40, 75), "pool_dtype": jnp.float8_e4m3fn, "scales": "token"},
    "int8 per head": {"lengths": (40, 75, *range(9)), "pool_dtype": jnp.int8, "scales": "head"},
    "sequences": {"lengths": (37, 0, 150), "counts": (37, 0, 9), "chunk": 40, "sinks": True},
    "tree": {"lengths": (37, 0, 150), "counts": (37, 0, 9), "chunk": 40, "tree": True, "softcap": 3.0},
    "window in a tree": {"lengths": (300, 20), "counts": (12, 3), "window": 70, "tree": True, "head_dim": 80},
    "float8 sequences": {"lengths": (90, 20), "counts": (8, 3), "pool_dtype": jnp.float8_e4m3fn, "scales": "head"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_that_of_the_equation(name):
    """Unseen pool entries are NaN. Computation in float32 keeps the result's rounding from hiding errors."""
    case = attention_case(dtype=jnp.float32, **OPTIONS[name])
    path = paged_attention.decode if case.starts is None else paged_attention.prefill
    got = np.array(jax.jit(lambda *a: path(*a, case.options))(*case.arrays))
    assert np.isfinite(got).all()
    if case.starts is not None:  # rows after ``count`` are padding
        for sequence, count in enumerate(case.lengths - case.starts):
            got[sequence, count:] = 0
    np.testing.assert_allclose(got, case.expected(), atol=5e-6, rtol=1e-5)


def test_a_row_does_not_depend_on_those_that_it_is_sorted_among():
    """Twenty rows are sorted and run in three groups: neither the group nor the index in it changes a bit."""
    pool, q = _pool(5, 320, 2, 16, 8), _queries(6, 20, 4, 8)
    tables = jnp.asarray(np.random.default_rng(7).permutation(320).reshape(20, 16), jnp.int32)
    decode = jax.jit(lambda *a: paged_attention.decode(*a, AttentionOptions(SCALE)))
    lengths = np.random.default_rng(8).integers(1, 256, 20)
    lengths[3] = 100
    rows = []
    for others in (lengths, np.zeros(20, int), np.full(20, 256), lengths[::-1]):
        now = others.copy()
        now[3] = 100
        rows.append(np.asarray(decode(q, pool, tables, jnp.asarray(now, jnp.int32))[3]).tobytes())
    assert len(set(rows)) == 1


def shapes(dtype, *, chunk=None, group=4, head_dim=128, page=64):
    """Return operands of `decode`, or of `prefill` with ``chunk`` queries per sequence."""
    rows = (3,) if chunk is None else (3, chunk)
    q = jax.ShapeDtypeStruct((*rows, 2 * group, head_dim), dtype)
    pool = jax.ShapeDtypeStruct((9, 2, 2, page, head_dim), dtype)
    table, length = jax.ShapeDtypeStruct((3, 4), jnp.int32), jax.ShapeDtypeStruct((3,), jnp.int32)
    return (q, pool, table, length) if chunk is None else (q, pool, table, length, length)


H100, A100 = Target("gpu", HOPPER), Target("gpu", AMPERE)


@pytest.mark.parametrize(
    ("operands", "target", "path", "why"),
    [
        (shapes(jnp.bfloat16), H100, "mosaic", "capability 9.0"),
        (shapes(jnp.bfloat16), A100, "mosaic", "capability 8.0"),
        (shapes(jnp.bfloat16, chunk=3), A100, "mosaic", "capability 8.0"),
        (shapes(jnp.bfloat16, chunk=256), A100, "mosaic", "capability 8.0"),
        (shapes(jnp.bfloat16, chunk=256, head_dim=96), A100, "xla", "head_dim 96"),
        (shapes(jnp.bfloat16), None, "xla", "platform cpu"),
        (shapes(jnp.float32), H100, "xla", "float32"),
        (shapes(jnp.bfloat16, head_dim=72), H100, "xla", "head_dim 72"),
        (shapes(jnp.bfloat16, chunk=3), H100, "mosaic", "capability 9.0"),
        (shapes(jnp.bfloat16, chunk=256), H100, "mosaic", "capability 9.0"),
        (shapes(jnp.bfloat16, chunk=256, page=48), H100, "xla", "page size 48"),
        (shapes(jnp.float32, chunk=256), H100, "xla", "are too many; queries are float32"),
    ],
)
def test_the_path_and_why(operands, target, path, why):
    explain = paged_attention.explain_decode if len(operands) == 4 else paged_attention.explain_prefill
    choice = explain(*operands, AttentionOptions(SCALE), target=target)
    assert choice.path == path
    assert why in choice.why


@pytest.mark.parametrize("target", [H100, A100])
@pytest.mark.parametrize("chunk", [3, 256])
def test_no_kernel_attends_in_both_directions(target, chunk):
    options = AttentionOptions(SCALE, ends=jax.ShapeDtypeStruct((3, chunk), jnp.int32))
    choice = paged_attention.explain_prefill(*shapes(jnp.bfloat16, chunk=chunk), options, target=target)
    assert (choice.path, "both directions" in choice.why) == ("xla", True)


def test_a_path_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="float32"):
        jax.eval_shape(
            lambda *a: paged_attention.prefill(*a, AttentionOptions(SCALE), path="mosaic"),
            *shapes(jnp.float32, chunk=256),
        )


@pytest.mark.parametrize(("chunk", "kernel"), [(3, "decode"), (16, "decode"), (17, "prefill")])
def test_few_queries_are_the_decode_kernels(monkeypatch, chunk, kernel):
    """The decode kernel takes 64 queries: 16 tokens with four heads per KV head."""
    fakes = (
        each._replace(run=lambda q, *_, times=times: q * times)
        for times, each in enumerate(api.IMPLEMENTATIONS["prefill"], 1)
    )
    monkeypatch.setitem(api.IMPLEMENTATIONS, "prefill", tuple(fakes))
    operands = [jnp.ones(each.shape, each.dtype) for each in shapes(jnp.bfloat16, chunk=chunk)]
    got = paged_attention.prefill(*operands, AttentionOptions(SCALE), path="mosaic")
    assert got[0, 0, 0, 0] == {"decode": 1, "prefill": 2}[kernel]
