"""MLA: XLA and the Mosaic kernel (interpreted on CPU) against float64, with NaN in all memory that must not be read."""

import dataclasses
import functools
import inspect
import linecache
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat, mla_attention
from pallas_kernels.choice import Target
from pallas_kernels.mla_attention import LatentOptions, reference, xla
from pallas_kernels.mla_attention.mosaic import attention, consumer, producer, schedule
from pallas_kernels.mla_attention.mosaic.attention import Tiles
from pallas_kernels.mla_attention.mosaic.operands import Shape

ROPE = 64
SCALE = 192**-0.5
# Relative error of the whole result, on top of its own rounding (half an ulp): probabilities are rounded to the dtype
# before they are multiplied with the values. Each weight may be off by half an ulp, so single numbers get more.
ERROR = {jnp.bfloat16: 1e-3, jnp.float16: 2e-4, jnp.float32: 1e-5}
WORST = 3  # factor for single numbers, relative to the largest number
HALF_ULP = {jnp.bfloat16: 2**-8, jnp.float16: 2**-11, jnp.float32: 0.0}


@dataclasses.dataclass(frozen=True)
class Case:
    """Operands of `prefill` if ``counts`` gives the queries per sequence, else of `decode`."""

    q: np.ndarray
    pool: np.ndarray
    tables: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray | None
    options: LatentOptions

    @property
    def arrays(self):
        middle = () if self.starts is None else (self.starts,)
        return tuple(jnp.asarray(x) for x in (self.q, self.pool, self.tables, *middle, self.lengths))

    def real(self, got):
        """Return the results with those of padding queries zeroed."""
        if self.starts is None:
            return got
        padding = self.starts[:, None] + np.arange(self.q.shape[1]) >= self.lengths[:, None]
        return np.where(padding[..., None, None], 0.0, got)


def make_case(
    lengths, counts=None, *, page=16, heads=16, rank=128, dtype=jnp.bfloat16, width=None, spread=1.0, quantized=False
):
    rng = np.random.default_rng(0)
    rows, width = len(lengths), width or max(1, -(-max(lengths) // page))
    numbers = rng.normal(size=(rows * width, page, rank + ROPE)).astype(np.float32)
    scales = rng.uniform(0.5, 1.5, size=(rows * width, page, 2)).astype(np.float32) if quantized else None
    pool = numbers.astype(jnp.float8_e4m3fn if quantized else dtype)
    tables = rng.permutation(rows * width).astype(np.int32).reshape(rows, width)
    for table, length in zip(tables, lengths, strict=True):
        foreign = np.arange(width * page).reshape(width, page) >= length
        for at, gone in zip(table, foreign, strict=True):
            pool[at][gone] = np.nan
        table[-(-length // page) :] = rng.choice([-7, 10**6])
    shape, starts = (rows, heads, rank + ROPE), None
    if counts is not None:
        shape = (rows, max(counts), heads, rank + ROPE)
        starts = np.asarray(lengths, np.int32) - np.asarray(counts, np.int32)
    options = LatentOptions(SCALE, rank, None if scales is None else jnp.asarray(scales))
    q = (rng.normal(size=shape) * spread).astype(dtype)
    return Case(q, pool, tables, np.asarray(lengths, np.int32), starts, options)


def expected(case):
    entry = reference.decode if case.starts is None else reference.prefill
    with jax.enable_x64(True):
        return np.asarray(jax.jit(functools.partial(entry, options=case.options, dtype=jnp.float64))(*case.arrays))


def assert_close(case, got, dtype):
    want, got = expected(case), case.real(np.asarray(got, np.float64))
    errors = np.maximum(np.abs(got - want) - HALF_ULP[dtype] * np.abs(want) * (1 + 1e-6), 0.0)
    assert np.linalg.norm(errors) <= ERROR[dtype] * np.linalg.norm(want)
    assert errors.max() <= WORST * ERROR[dtype] * np.abs(want).max()
    assert not got[case.lengths == 0].any()


def run(case, entry, tiles=None):
    how = {"tiles": tiles, "interpret": compat.interpret_params()}
    return np.asarray(compat.interpreted(lambda: entry(*case.arrays, case.options, **how)))


SMALL = Tiles(keys_per_split=128, blocks=3)
DECODE = {
    "three splits": ((37, 0, 300), {}, SMALL),
    "rank 512, one split": ((65,), {"rank": 512, "page": 64}, Tiles(blocks=1)),
    "two tiles": ((128, 1), {"heads": 128, "page": 32}, Tiles(keys_per_split=128, blocks=2)),
}
SLOW_DECODE = {
    "rank 512, splits": ((257, 64), {"rank": 512, "page": 64}, SMALL),
    "page 128": ((129, 127), {"page": 128, "heads": 8}, SMALL),
    "float16": ((100, 256), {"dtype": jnp.float16, "heads": 32}, SMALL),
    "sharp": ((90, 140), {"spread": 30.0}, Tiles(keys_per_split=128, blocks=1)),
    "many blocks": ((129, 16, 15), {"heads": 24, "width": 20}, Tiles(keys_per_split=128, blocks=9)),
    "nine splits": ((1100,), {"page": 64, "heads": 8}, SMALL),
}


@pytest.mark.parametrize("name", [*DECODE, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_DECODE)])
def test_decode_equals_float64(name):
    lengths, options, tiles = (DECODE | SLOW_DECODE)[name]
    case = make_case(lengths, **options)
    assert_close(case, run(case, attention.decode, tiles), options.get("dtype", jnp.bfloat16))


PREFILL = {
    "extend across a split": (attention.extend, (130, 3), (4, 3), {"heads": 16}),
    "prefill with a prefix": (attention.prefill, (150, 20), (9, 6), {"heads": 16}),
}
SLOW_PREFILL = {
    "heads 24": (attention.prefill, (70, 64), (11, 3), {"heads": 24}),
    "heads 128": (attention.prefill, (66,), (3,), {"heads": 128, "page": 64}),
    "from the start": (attention.prefill, (40, 0), (40, 0), {"heads": 8, "page": 32}),
    "rank 512": (attention.prefill, (100,), (10,), {"heads": 16, "rank": 512, "page": 64}),
    "extend 2 of 128 heads": (attention.extend, (129,), (2,), {"heads": 128}),
}


@pytest.mark.parametrize("name", [*PREFILL, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_PREFILL)])
def test_chunks_equal_float64(name):
    entry, lengths, counts, options = (PREFILL | SLOW_PREFILL)[name]
    case = make_case(lengths, counts, **options)
    assert_close(case, run(case, entry, SMALL), jnp.bfloat16)


def test_neighbours_pages_and_table_width_change_no_bit():
    case = make_case((140, 20, 60), heads=8, width=16)
    together = run(case, attention.decode, SMALL)
    moved = np.random.default_rng(1).permutation(case.pool.shape[0])  # page p moves to moved[p]
    pool = np.empty_like(case.pool)
    pool[moved] = case.pool
    alone = dataclasses.replace(
        case, q=case.q[:1], pool=pool, tables=moved[case.tables[:1, :9]].astype(np.int32), lengths=case.lengths[:1]
    )
    assert run(alone, attention.decode, Tiles(keys_per_split=128, blocks=2)).tobytes() == together[:1].tobytes()


@pytest.mark.parametrize(
    "wait",
    [
        "probs_ready",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("query_ready", "totals_ready", "query_free", "barrier_wait(free)", "barriers.ready")
        ),
    ],
)
def test_a_missing_wait_is_caught(monkeypatch, wait):
    original, skipped = plgpu.barrier_wait, []

    def wait_unless_chosen(ref):
        caller = inspect.currentframe().f_back
        if wait in linecache.getline(caller.f_code.co_filename, caller.f_lineno):
            skipped.append(ref)
        else:
            original(ref)

    monkeypatch.setattr(plgpu, "barrier_wait", wait_unless_chosen)
    case = make_case((300,), heads=8)
    with pytest.raises(Exception, match=r"(?i)race|barrier"):
        run(case, attention.decode, Tiles(blocks=1, keys_per_split=256))
    assert skipped


def off_by_one(shape, unit, key, scores):
    return consumer_mask(shape, unit._replace(length=unit.length + 1, start=unit.start + 1), key, scores)


def no_clearing(*_):
    return None


def wrong_page(shape, gmem, sequence, key):
    return page_id(shape, gmem, sequence, key + shape.page)


def unscaled(own):
    return others_top(own) * 0.0


consumer_mask, page_id, others_top = consumer._mask, producer._page_id, consumer._others_top


@pytest.mark.parametrize(
    ("module", "name", "mutant"),
    [
        pytest.param(consumer, "_mask", off_by_one, marks=pytest.mark.slow),
        pytest.param(consumer, "_clear_unseen", no_clearing, marks=pytest.mark.slow),
        pytest.param(producer, "_page_id", wrong_page, marks=pytest.mark.slow),
        pytest.param(consumer, "_others_top", unscaled, marks=pytest.mark.slow),
    ],
)
def test_mutations_are_caught(monkeypatch, module, name, mutant):
    monkeypatch.setattr(module, name, mutant)
    case = make_case((90,), (3,), heads=8, spread=4.0)
    got = run(case, attention.prefill)
    with pytest.raises(AssertionError):
        assert_close(case, got, jnp.bfloat16)


@pytest.mark.slow
def test_the_mutants_case_is_right_without_mutation():
    case = make_case((90,), (3,), heads=8, spread=4.0)
    assert_close(case, run(case, attention.prefill), jnp.bfloat16)


# --------------------------------------------------------------------------------------------------------------
# Tests that do not need the interpreter.


@pytest.mark.parametrize("blocks", [1, 3, 132])
@pytest.mark.parametrize("lengths", [(0,), (1, 0, 4000), (128, 129, 300, 0, 512), (100_000, 5)])
def test_every_unit_has_one_block(lengths, blocks):
    tiles = Tiles(keys_per_split=256, blocks=blocks)
    shape = Shape(len(lengths), 1, 128, 512, 64, 2000, jnp.bfloat16, 1.0, tiles, True, False)
    sequences, within, counts = np.asarray(schedule.plan(shape, jnp.asarray(lengths, jnp.int32)))
    units = [max(1, math.ceil(length / 256)) * shape.tile_count for length in lengths]
    flat = np.concatenate([[0], np.cumsum(units)])[sequences] + within
    assert counts.sum() == sum(units)
    done = 0
    for first, count in zip(flat, counts, strict=True):
        assert count == 0 or first == done
        done += count


@pytest.mark.parametrize(
    ("lengths", "counts", "options"),
    [
        ((37, 0, 150), None, {}),
        ((1, 16, 17, 64, 200, 63, 5, 90, 128, 2), None, {"page": 32, "width": 9}),
        ((70, 300), None, {"quantized": True}),
        ((150, 20, 0), (9, 6, 0), {}),
        ((130,), (130,), {"heads": 3, "page": 64}),
    ],
)
def test_xla_equals_float64(lengths, counts, options):
    case = make_case(lengths, counts, **{"heads": 4, "dtype": jnp.float32, "rank": 32} | options)
    entry = xla.decode if counts is None else xla.prefill
    assert_close(case, entry(*case.arrays, case.options), jnp.float32)


def test_a_cpus_bytes_are_the_bits_of_float8():
    case = make_case((70, 300), heads=4, rank=32, dtype=jnp.float32, quantized=True)
    bytes_alone = dataclasses.replace(case, pool=case.pool.view(np.uint8))
    want, got = (np.asarray(xla.decode(*each.arrays, each.options)) for each in (case, bytes_alone))
    np.testing.assert_array_equal(got, want)


def test_xla_neighbours_and_table_width_change_no_bit():
    case = make_case((250, 40, 9, 70, 1, 2, 3, 4, 5, 6), heads=4, rank=32, width=40)
    together = np.asarray(xla.decode(*case.arrays, case.options))
    q, pool, tables, lengths = case.arrays
    alone = np.asarray(xla.decode(q[:1], pool, tables[:1, :16], lengths[:1], case.options))
    assert alone.tobytes() == together[:1].tobytes()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 96}, "latent of 96"),
        ({"page": 24}, "page size 24"),
        ({"dtype": jnp.float32}, "float32"),
        ({"quantized": True}, "float8"),
    ],
)
def test_refuses_what_it_cannot_do(options, said):
    case = make_case((8,), **options)
    assert said in attention.refusal(case.arrays, case.options)
    with pytest.raises(ValueError, match=said):
        mla_attention.decode(*case.arrays, case.options, path="mosaic")
    assert_close(case, mla_attention.decode(*case.arrays, case.options), options.get("dtype", jnp.bfloat16))


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="keys_per_split"):
        Tiles(keys_per_split=64)
    case = make_case((8,), (1,))
    with pytest.raises(ValueError, match="do not fit"):
        reference.prefill(*case.arrays, LatentOptions(SCALE, 128 + ROPE + 1))


def test_explains_its_choice():
    case = make_case((8,))
    hopper = mla_attention.explain(*case.arrays, case.options, target=Target("gpu", (9, 0)))
    assert hopper.path == "mosaic"
    assert mla_attention.explain(*case.arrays, case.options, target=Target("cpu")).path == "xla"
    assert "8.0" in mla_attention.explain(*case.arrays, case.options, target=Target("gpu", (8, 0))).why
    chunks = make_case((9,), (4,))
    for entry in (mla_attention.extend, mla_attention.prefill):
        assert_close(chunks, entry(*chunks.arrays, chunks.options, path="xla"), jnp.bfloat16)
