"""The lora kernels, interpreted on the CPU with a fake `mma`. Compilation: test_check.py."""

import functools
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.quant import LoRAWeight, matmul_transposed
from jaxinfer.quant.lora_weight import rows_of
from pallas_kernels import compat
from pallas_kernels.choice import Choice
from pallas_kernels.lora import api, mosaic, reference
from tests.kernels.quant_cases import DIGITS

SLOTS = 4
HERE = {"path": "mosaic"}


def operands(rows, *, rank=8, k=128, n=64, dtype=jnp.bfloat16, seed=0):
    """Return rows, banks of four adapters, and slots: slot 2 has most rows, slot 1 none; some rows have no adapter."""
    rng = np.random.default_rng(seed)
    dims = (rows, k), (SLOTS, rank, k), (SLOTS, n, rank)
    x, a, b = (jnp.asarray(rng.normal(size=each) / each[-1] ** 0.5, dtype) for each in dims)
    slots = rng.choice([0, 2, 3, -1], rows, p=[0.2, 0.5, 0.1, 0.2])
    slots[: 5 if rows > 5 else 1] = [2, 0, 2, 3, -1][: 5 if rows > 5 else 1]
    return x, a, b, jnp.asarray(slots, jnp.int32)


def run(x, a, b, slots, module=mosaic):
    groups = api.group(slots, a.shape[0], x.shape[0], **HERE)
    product = jax.jit(functools.partial(module.low_rank, interpret=compat.interpret_params()))
    return np.asarray(compat.interpreted(lambda: product(x, a, b, groups)))


def assert_close(got, x, a, b, slots):
    """Check to half a unit in the last place, plus the same of each rank's magnitude: the intermediate is rounded."""
    wide, shrink, expand = (np.asarray(one, np.float64) for one in (x, a, b))
    own = np.asarray(slots)
    hidden = np.einsum("ik,irk->ir", wide, shrink[own])
    want = np.einsum("ir,inr->in", hidden, expand[own]) * (own >= 0)[:, None]
    sizes = np.einsum("ir,inr->in", np.abs(hidden), np.abs(expand[own]))
    half = 2.0 ** -DIGITS[got.dtype.name]
    error = np.abs(got.astype(np.float64) - want)
    np.testing.assert_array_less(error, half * np.abs(want) + (half + 2e-6) * sizes + 1e-30)
    assert not got[own < 0].any()


CASES = {
    "rank 8, adapters of several tiles": (37, {"k": 192}),
    "rank 16, splits": (7, {"rank": 16, "k": 576, "n": 96}),
    "float32": (6, {"rank": 8, "dtype": jnp.float32, "k": 320}),
}
SLOW = {
    "one row": (1, {}),
    "rank 64, float16, several parts of channels": (20, {"rank": 64, "n": 256, "dtype": jnp.float16}),
    "rank 24, channels of 128": (9, {"rank": 24, "n": 128, "k": 64}),
    "rank 3": (9, {"rank": 3, "n": 32, "k": 64}),
    "rank 192": (6, {"rank": 192, "k": 128}),
    "the last split is shorter": (6, {"rank": 8, "k": 2112, "n": 32}),
    "several pieces to a split": (6, {"rank": 64, "k": 512, "n": 32}),
    "tiles of 32 rows": (70, {"rank": 16}),
    "float32, rank 64": (20, {"rank": 64, "dtype": jnp.float32, "n": 128}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES | SLOW]
)
def test_equals_float64(name):
    rows, options = (CASES | SLOW)[name]
    case = operands(rows, **options)
    assert_close(run(*case), *case)


def test_what_belongs_to_nobody_changes_nothing():
    """NaN in rows without an adapter and in unused bank slots changes no result."""
    x, a, b, slots = operands(9)
    nobody = np.asarray(slots) < 0
    assert nobody.any()
    assert not (np.asarray(slots) == 1).any()
    got = run(jnp.where(nobody[:, None], jnp.nan, x), a.at[1].set(jnp.nan), b.at[1].set(jnp.nan), slots)
    assert_close(got, x, a, b, slots)


@pytest.mark.slow
def test_no_bit_of_a_row_depends_on_its_tile_on_other_rows_or_on_the_bank():
    x, a, b, slots = operands(70, rank=24, k=576)
    whole, at = run(x, a, b, slots), 2
    assert int(slots[at]) == 2
    others = jnp.full((9, x.shape[1]), jnp.nan, x.dtype).at[4].set(x[at])
    bank = (jnp.full_like(one, jnp.nan).at[3].set(one[2]) for one in (a, b))
    alone = run(others, *bank, jnp.full(9, 3, jnp.int32))
    assert alone[4].tobytes() == whole[at].tobytes()


@pytest.mark.slow
def test_no_row_at_all():
    x, a, b, slots = operands(6)
    assert not run(jnp.full_like(x, jnp.nan), a, b, jnp.full_like(slots, -1)).any()


@pytest.mark.slow
def test_adapted_weights_by_the_kernels_equal_those_by_xla(monkeypatch):
    x, a, b, slots = operands(13, rank=16)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(4, 16, 128)), x.dtype)

    def layer():
        banks = {"a": a, "b": b.reshape(SLOTS, 4, 16, 16)}
        return matmul_transposed(x, LoRAWeight(weight, **banks, rows=rows_of(slots, SLOTS)))

    expected = jax.jit(layer)()
    kernel = functools.partial(mosaic.low_rank, interpret=compat.interpret_params())
    monkeypatch.setattr(api, "choose", lambda *_, **__: Choice("mosaic", ""))
    monkeypatch.setattr(mosaic, "low_rank", kernel)
    jax.clear_caches()
    traced = str(jax.make_jaxpr(layer)())
    assert "lora_shrink" in traced
    assert "lora_expand" in traced
    got = compat.interpreted(jax.jit(layer))
    np.testing.assert_array_equal(got[slots < 0], expected[slots < 0])
    np.testing.assert_allclose(np.float64(got), np.float64(expected), rtol=2**-7, atol=2e-2)


# Mutations and the tests that must then fail.
MUTATIONS = {
    "an adapter's first matrix": ("gmem.a.at[gmem.owners[tile], :, inputs]", "gmem.a.at[0, :, inputs]"),
    "an adapter's second matrix": ("gmem.b.at[gmem.owners[tile], ", "gmem.b.at[0, "),
    "a piece's inputs": ("pl.ds(pl.multiple_of(index * shape.piece, ", "pl.ds(pl.multiple_of(index * 0, "),
    "a split's first piece": ("first, last = split * pieces, ", "first, last = split * 0, "),
    "the last split's end": ("jnp.minimum(pieces, last + 1 - first)", "pieces"),
    "the next piece": ("jnp.minimum(first + index + 1, last)", "jnp.minimum(first + index, last)"),
    "one split of all": ("for split in range(shape.splits)]", "for split in range(1)]"),
    "a part's channels": ('lax.axis_index("part") * shape.block_channels', 'lax.axis_index("part") * 0'),
    "ranks that are filled up": ("if shape.filled > shape.rank:", "if False:"),
    "steps of a product": ("along = pl.ds(first, _STEP)", "along = pl.ds(0, _STEP)"),
    "tiles that hold something": ("pl.when(tile < gmem.occupied[0])", "pl.when(tile < 1)"),
    "a row's place": (".at[groups.places]", ".at[groups.places + 1]"),
    "lines of b": ("pl.ds(first + line, some), :]), line)", "pl.ds(first + line, some), :]), 0)"),
}


def mutant(old, new):
    source = inspect.getsource(mosaic)
    assert source.count(old) >= 1
    changed = types.ModuleType(mosaic.__name__)
    changed.__dict__.update(mosaic.__dict__)
    exec(compile(source.replace(old, new), mosaic.__file__, "exec"), changed.__dict__)
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught(name):
    options = {"rank": 128, "n": 256} if name == "lines of b" else {"rank": 24, "k": 2112, "n": 256}
    case = operands(6, **options)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_close(run(*case, mutant(*MUTATIONS[name])), *case)


FLOAT32 = {
    "the third part": ("return 3 if self.dtype == jnp.float32 else 1", "return 2 if self.dtype == jnp.float32 else 1"),
    "products of unlike parts": ("rights[order - part]", "rights[order]"),
    "what a part leaves": ("value = value - own.astype(value.dtype)", "pass"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOAT32)
def test_a_mutation_of_float32_is_caught(name):
    case = operands(6, rank=16, dtype=jnp.float32)
    with pytest.raises(AssertionError):
        assert_close(run(*case, mutant(*FLOAT32[name])), *case)


BF16, FP16, F32, F64 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64


@pytest.mark.parametrize(
    ("x", "a", "b", "why"),
    [
        ((BF16, 3, 96), (BF16, 4, 8, 96), (BF16, 4, 64, 8), "96 inputs"),
        ((BF16, 3, 64), (BF16, 4, 8, 64), (BF16, 4, 40, 8), "40 outputs"),
        ((BF16, 3, 64), (BF16, 4, 8, 128), (BF16, 4, 64, 8), "x (3, 64)"),
        ((BF16, 3, 64), (BF16, 4, 8, 64), (BF16, 4, 64, 16), "b (4, 64, 16)"),
        ((F32, 3, 64), (BF16, 4, 8, 64), (BF16, 4, 64, 8), "float32 times bfloat16"),
        ((BF16, 3, 64), (BF16, 4, 264, 64), (BF16, 4, 64, 264), "rank 264: at most 256"),
        ((F32, 3, 64), (F32, 4, 200, 64), (F32, 4, 64, 200), "rank 200: at most 192"),
        ((BF16, 3, 64), (BF16, 4, 0, 64), (BF16, 4, 64, 0), "rank 0"),
        ((F64, 3, 64), (F64, 4, 8, 64), (F64, 4, 64, 8), "float64 times"),
    ],
)
def test_refuses_what_it_cannot_do(x, a, b, why):
    case = (jax.ShapeDtypeStruct(dims, dtype) for dtype, *dims in (x, a, b))
    assert why in mosaic.refusal(*case)


@pytest.mark.parametrize(
    ("rows", "why"), [(8, "tiles of 8 rows"), (48, "tiles of 48 rows"), (None, "a tile of its own")]
)
def test_refuses_tiles_that_are_not_for_it(rows, why):
    x, a, b, slots = operands(9)
    groups = api.group(slots, SLOTS, 9, **HERE)
    groups = groups._replace(**({"entries": jnp.zeros((3, rows), jnp.int32)} if rows else {"experts": None}))
    with pytest.raises(ValueError, match=why):
        mosaic.low_rank(x, a, b, groups)


@pytest.mark.parametrize("rows", mosaic.TILE_ROWS)
@pytest.mark.parametrize("rank", [1, 8, 12, 16, 24, 48, 64, 128, 192, 256])
@pytest.mark.parametrize("inputs", [64, 192, 768, 2880, 4096, 5120, 14336, 53248])
def test_splits_are_all_inputs_once_and_depend_on_nothing_else(rank, inputs, rows):
    for dtype in (BF16, F32):
        shape = mosaic._Shape(3, rows, 1, rank, inputs, 64, jnp.dtype(dtype), False)
        assert shape.split == mosaic._Shape(3, 16, 1, 8, inputs, 64, jnp.dtype(BF16), False).split
        assert shape.split * (shape.splits - 1) < inputs <= shape.split * shape.splits
        assert shape.splits <= 8
        assert shape.split % shape.piece == inputs % shape.piece == shape.piece % 16 == 0


def test_the_reference_is_what_the_tests_compare_with():
    x, a, b, slots = operands(9, dtype=F32)
    with jax.enable_x64(True):
        got = reference.low_rank(x, a, b, slots, dtype=F64)
        assert got.dtype == F64
    assert_close(np.asarray(got, np.float32), x, a, b, slots)
