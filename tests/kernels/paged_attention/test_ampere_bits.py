"""Below Hopper, decode and prefill of the same position are bitwise identical for any chunk.

Interpreted, with stand-ins for operations that a GPU computes identically in every program and XLA's CPU backend does
not: `mma` adds its products one after another (they are exact in float32), and powers of two scale exactly. Scores are
scaled by powers of two, which are exact with and without contraction. Results are compared in float32, since rounding
to 16 bits hides most differences.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import compat
from pallas_kernels.check.cases import attention_case
from pallas_kernels.paged_attention.ampere import kernel, merge
from pallas_kernels.paged_attention.ampere import launch as ampere
from pallas_kernels.paged_attention.ampere.launch import Tiles
from tests.kernels.paged_attention.powers import LN_2, power
from tests.kernels.paged_attention.test_ampere import mutant

CAP = 8 * LN_2
SHIPPED = Tiles(stages=2)
SHORT = Tiles(stages=2, keys_per_split=128)


def in_order(left, right, preferred_element_type):
    def add(at, total):
        column, row = lax.dynamic_slice_in_dim(left, at, 1, 1), lax.dynamic_slice_in_dim(right, at, 1, 0)
        return total + column.astype(jnp.float32) * row.astype(jnp.float32)

    zeros = jnp.zeros((left.shape[0], right.shape[1]), preferred_element_type)
    return lax.fori_loop(0, left.shape[1], add, zeros)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    unparted = ampere._unparted

    def in_float32(shape, q, results):
        return unparted(shape, jax.ShapeDtypeStruct(q.shape, jnp.float32), results)

    monkeypatch.setattr(ampere, "_unparted", in_float32)
    monkeypatch.setattr(jnp, "dot", in_order)
    monkeypatch.setattr(jnp, "exp2", power)


def interpreted(path, arrays, options, tiles):
    how = {"tiles": tiles, "interpret": compat.interpret_params()}
    return np.asarray(compat.interpreted(lambda: path(*arrays, options, **how)))


def decoded(case, positions, tiles):
    """Return the decode output at each position of the case's one sequence, one row per position."""
    q, pool, tables = case.q[0], case.pool, np.repeat(case.tables, len(positions), 0)
    queries = q[[position - case.starts[0] for position in positions]]
    arrays = [jnp.asarray(each) for each in (queries, pool, tables, np.asarray(positions, np.int32) + 1)]
    return interpreted(ampere.decode, arrays, case.options, tiles)


def extended(case, start, count, tiles, module=ampere):
    """Return the prefill output of ``count`` positions of the case from ``start`` on."""
    first = start - case.starts[0]
    q, starts, lengths = (
        case.q[:, first : first + count],
        np.full(1, start, np.int32),
        np.full(1, start + count, np.int32),
    )
    arrays = [jnp.asarray(each) for each in (q, case.pool, case.tables, starts, lengths)]
    return interpreted(module.extend, arrays, case.options, tiles)[0]


# Tiles, case, and the positions that are also decoded.
CASES = {
    "window, softcap, sinks, three to a group": (
        SHORT,
        {"lengths": (420,), "counts": (180,), "page": 32, "group": 3, "window": 300, "softcap": CAP, "sinks": True},
        (240, 255, 256, 300, 383, 384, 385, 419),
    ),
}
SLOW = {
    "beyond 1024 keys": (
        SHIPPED,
        {"lengths": (1060,), "counts": (60,), "page": 128, "group": 8},
        (1000, 1022, 1023, 1024, 1025, 1059),
    ),
    "beyond 512 keys, from the first": (
        SHIPPED,
        {"lengths": (530,), "counts": (530,), "page": 64, "group": 2, "spread": 5.0, "sinks": True},
        (0, 1, 63, 64, 65, 300, 511, 512, 529),
    ),
    "float16, dim 128, softcap": (
        SHORT,
        {"lengths": (300,), "counts": (20,), "head_dim": 128, "group": 4, "dtype": jnp.float16, "softcap": CAP},
        (280, 290, 299),
    ),
    "a window of few keys": (
        SHORT,
        {"lengths": (290,), "counts": (70,), "page": 32, "group": 1, "window": 9},
        (220, 255, 256, 260, 289),
    ),
    "a sharp softmax": (
        SHORT,
        {"lengths": (400,), "counts": (100,), "page": 32, "group": 5, "spread": 60.0, "window": 290},
        (300, 384, 399),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES | SLOW]
)
def test_decode_and_prefill_agree(name):
    tiles, options, positions = (CASES | SLOW)[name]
    case = attention_case(**options, kv_heads=1, scale=LN_2 / 8)
    start, count = int(case.starts[0]), case.q.shape[1]
    chunk, rows = extended(case, start, count, tiles), decoded(case, positions, tiles)
    for position, row in zip(positions, rows, strict=True):
        assert row.tobytes() == chunk[position - start].tobytes(), position


LONG = {"lengths": (420,), "counts": (60,), "page": 32, "group": 4, "kv_heads": 1, "sinks": True, "scale": LN_2 / 8}


@pytest.mark.slow
@pytest.mark.parametrize(("start", "count"), [(400, 2), (399, 5), (392, 12), (391, 13), (390, 30), (361, 59)])
def test_chunks_of_any_size_agree(start, count):
    """Chunks of up to 12 tokens use a thread block per segment; longer ones use one per 12 tokens for all segments."""
    case = attention_case(**LONG)
    whole = extended(case, 360, 60, SHORT)
    assert extended(case, start, count, SHORT).tobytes() == whole[start - 360 : start - 360 + count].tobytes()


# Each changes one of the two programs, and no result by more than its rounding error.
MUTATIONS = {
    "segments": (
        kernel,
        "per_segment = jnp.int32(shape.blocks_per_segment)",
        "per_segment = jnp.int32(999)",
    ),
    "segments at absolute positions": (
        kernel,
        "of_blocks(number * per_segment, (number + 1) * per_segment)",
        "of_blocks(number * per_segment - 1, (number + 1) * per_segment - 1)",
    ),
    "maxima that begin anew": (
        kernel,
        "nothing((shape.head_dim, shape.columns), shape.dtype))",
        "(none := nothing((shape.head_dim, shape.columns), shape.dtype))"
        "._replace(top=none.top * 0 + 8 if shape.whole else none.top))",
    ),
    "order": (merge, "first + jnp.minimum(number, count - 1)", "first + jnp.maximum(count - 1 - number, 0)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught(name, monkeypatch):
    case = attention_case(**LONG)
    positions = range(400, 420, 3)
    rows = decoded(case, positions, SHORT)
    mutant(*MUTATIONS[name], monkeypatch)
    again, chunk = decoded(case, positions, SHORT), extended(case, 360, 60, SHORT)[40::3]
    np.testing.assert_allclose(chunk, rows, atol=1e-5)
    np.testing.assert_allclose(again, rows, atol=1e-5)
    assert again.tobytes() != chunk.tobytes()
