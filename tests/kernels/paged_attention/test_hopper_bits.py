"""On Hopper, decode and prefill of the same position are bitwise identical for any chunk.

Interpreted with numpy's matrix products, whose shapes and summation orders differ. So the inputs make sums within a
split exact in any order, and sums over several splits inexact: values of the first split are large, and those of the
third cancel them, so that the result shows how sums over splits were rounded. Powers of two use a stand-in that scales
exactly, as the hardware does; scores are scaled by powers of two, which no contraction changes.
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.paged_attention import AttentionOptions
from pallas_kernels.paged_attention.hopper import softmax
from pallas_kernels.paged_attention.hopper.decode import launch as decode
from pallas_kernels.paged_attention.hopper.prefill import launch as prefill
from pallas_kernels.paged_attention.hopper.prefill import types
from tests.kernels.paged_attention.powers import LN_2, power

SPLIT, KEYS, PAGE, DIM, GROUP = 128, 400, 32, 64, 4
DECODE = decode.Tiles(stages=2, keys_per_split=SPLIT, blocks=3)
WIDE, NARROW = prefill.Tiles(128, 2, 4, SPLIT), prefill.Tiles(64, 3, 2, SPLIT)


@pytest.fixture(autouse=True)
def exact_powers(monkeypatch):
    monkeypatch.setattr(jnp, "exp2", power)


def operands(seed=0):
    """Return queries of the last 40 positions, a pool and its block table."""
    rng = np.random.default_rng(seed)
    q = rng.integers(-1, 2, (1, 40, GROUP, DIM))
    keys, values = rng.integers(-1, 2, (KEYS, DIM)), rng.integers(-2, 3, (KEYS, DIM)).astype(np.float64)
    values[:SPLIT] *= 2**12
    keys[2 * SPLIT : 3 * SPLIT], values[2 * SPLIT : 3 * SPLIT] = keys[:SPLIT], -values[:SPLIT]
    width = -(-KEYS // PAGE)
    pool = np.full((width, 2, 1, PAGE, DIM), np.nan)
    table = rng.permutation(width)
    for i, numbers in enumerate((keys, values)):
        for at, page in enumerate(table):
            some = numbers[at * PAGE : (at + 1) * PAGE]
            pool[page, i, 0, : len(some)] = some
    return (*(jnp.asarray(each, jnp.bfloat16) for each in (q, pool)), jnp.asarray(table[None], jnp.int32))


def interpreted(path, *arrays, options, tiles):
    how = {"tiles": tiles, "interpret": compat.interpret_params(detect_races=False)}
    return np.asarray(compat.interpreted(lambda: path(*arrays, options, **how)))


def decoded(options, positions):
    """Return the decode output at each position, one row per position."""
    q, pool, table = operands()
    rows = jnp.asarray(positions, jnp.int32)
    tables = jnp.repeat(table, len(positions), 0)
    return interpreted(decode.decode, q[0, rows - 360], pool, tables, rows + 1, options=options, tiles=DECODE)


def chunked(options, tiles, start=360, count=40, path=prefill.prefill):
    q, pool, table = operands()
    begin, end = (jnp.asarray([at], jnp.int32) for at in (start, start + count))
    some = q[:, start - 360 : start - 360 + count]
    return interpreted(path, some, pool, table, begin, end, options=options, tiles=tiles)[0]


PLAIN = AttentionOptions(LN_2 / 8)
SINKS = jnp.asarray([0.3, -1.0, 1.2, 0.0], jnp.float32)
EVERY = AttentionOptions(LN_2 / 8, window=300, softcap=8 * LN_2, sinks=SINKS)
POSITIONS = (360, 361, 383, 384, 385, 399)


@pytest.mark.parametrize(
    ("options", "tiles"),
    [
        (PLAIN, WIDE),
        (EVERY, NARROW),
        pytest.param(PLAIN, NARROW, marks=pytest.mark.slow),
        pytest.param(EVERY, WIDE, marks=pytest.mark.slow),
    ],
)
def test_decode_and_prefill_agree(options, tiles):
    rows, chunk = decoded(options, POSITIONS), chunked(options, tiles)
    for position, row in zip(POSITIONS, rows, strict=True):
        assert row.tobytes() == chunk[position - 360].tobytes(), position


@pytest.mark.slow
@pytest.mark.parametrize(("start", "count"), [(380, 8), (390, 10)])
def test_chunks_of_any_size_agree(start, count):
    whole = chunked(EVERY, WIDE)[start - 360 : start - 360 + count].tobytes()
    assert chunked(EVERY, WIDE, start, count).tobytes() == whole
    assert chunked(EVERY, DECODE, start, count, decode.extend).tobytes() == whole


def no_splits(monkeypatch):
    monkeypatch.setattr(types.Shape, "splits", property(lambda shape: False))


def splits_a_block_late(monkeypatch):
    begins = types.Tile.begins_split
    monkeypatch.setattr(types.Tile, "begins_split", lambda tile, shape, step: begins(tile, shape, step - 1))


@pytest.mark.parametrize("mutate", [no_splits, splits_a_block_late])
def test_other_splits_are_seen(monkeypatch, mutate):
    """Blocks of half a split are used: with whole splits the interpreter's running sum equals the sum over splits."""
    rows = decoded(PLAIN, POSITIONS)
    mutate(monkeypatch)
    chunk = chunked(PLAIN, NARROW)
    assert any(row.tobytes() != chunk[at - 360].tobytes() for at, row in zip(POSITIONS, rows, strict=True))


@pytest.mark.parametrize("scale", [1.0, 8.0, 100.0])
def test_no_bit_of_a_probability_depends_on_the_maximum(scale):
    """Other integer maxima scale the probabilities of `_fold` and decode exactly, and these stay accurate."""
    scores = jnp.asarray(np.random.default_rng(1).normal(size=20_000) * scale, jnp.float32)
    lifted = softmax.lifted(scores, 1.3)
    top = softmax.integer_top(lifted.max())

    def relative(higher):
        return np.asarray(softmax.probabilities(lifted, softmax.lifted_top(top + higher)))

    for higher in (1.0, 5.0, 30.0):
        some = relative(0.0) > 2.0**-90  # the rest become zeros
        assert (relative(higher)[some] * np.float32(2**higher) == relative(0.0)[some]).all()
        unrounded = np.asarray(power(scores * 1.3 - (top + higher)) * 2**higher)[some]
        assert scale > 8 or (unrounded != np.asarray(power(scores * 1.3 - top))[some]).any()
    want = np.exp2(np.asarray(scores, np.float64) * 1.3 - float(top))
    np.testing.assert_allclose(relative(0.0)[some], want[some], rtol=1e-4)


def test_sinks_lie_on_the_grid():
    levels = softmax.sink_levels(jnp.asarray([0.1, -3.7, 200.0, -jnp.inf, 1e9], jnp.float32))
    assert (np.asarray(levels[:2]) * 2**14 % 1 == 0).all()
    np.testing.assert_allclose(levels[:3], np.asarray([0.1, -3.7, 200.0]) * math.log2(math.e), rtol=1e-3)
    assert levels[3] == jnp.float32(softmax.LOWEST)
    assert softmax.integer(jnp.float32(2.4)) == 2
