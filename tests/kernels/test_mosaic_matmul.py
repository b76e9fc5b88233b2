"""The Mosaic GPU kernel of matmul, interpreted on the CPU. Compilation to machine code: test_check.py."""

import functools
import inspect
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.matmul import Extras, reference
from pallas_kernels.matmul.mosaic import kernel, launch
from pallas_kernels.matmul.types import CLUSTERS, Tiles
from tests.kernels.matmul_cases import BF16, F32, FP8, FP16, INT8, NAMES, assert_close, operands

LAST = {"layout": "in last"}
WITHOUT_SCALES = ("bias", "residual")


def run(arrays, tiles, **options):
    """Return the kernel's result; ``options`` are those of the product."""

    def product(*arrays):
        return launch.matmul(*arrays, **options, tiles=tiles, interpret=compat.interpret_params())

    return np.asarray(compat.interpreted(lambda: jax.jit(product)(*arrays)))


# Rows, outputs and inputs; options; tiles.
CASES = {
    "one row": ((1, 64, 128), {}, Tiles(1, 64, 64, 2, blocks=2)),
    "one row, in last": ((1, 48, 192), LAST, Tiles(1, 16, 64, 3, blocks=2)),
    "two units a block": ((70, 96, 192), {}, Tiles(1, 32, 64, 3, blocks=3)),
    "a bias and a residual": ((70, 112, 64), LAST | {"extras": WITHOUT_SCALES}, Tiles(1, 48, 64, 2, blocks=2)),
    "gated": ((67, 48, 128), LAST | {"gated": True}, Tiles(1, 32, 64, 2, blocks=2)),
    "a cluster along columns": (
        (65, 192, 64),
        {"extras": ("residual",)},
        Tiles(1, 64, 64, 2, column_blocks=2, blocks=2),
    ),
    "a cluster along rows": ((131, 64, 64), {"extras": ("bias",)}, Tiles(1, 64, 64, 2, row_blocks=2, blocks=2)),
    "a cluster of four along rows": ((200, 64, 64), {}, Tiles(1, 32, 64, 2, row_blocks=4, blocks=4)),
    "a cluster of four along columns": (
        (65, 112, 64),
        LAST | {"extras": WITHOUT_SCALES},
        Tiles(1, 16, 64, 2, column_blocks=4, blocks=4),
    ),
    "a cluster of two by two": (
        (140, 192, 192),
        {"extras": ("residual",)},
        Tiles(1, 64, 64, 2, row_blocks=2, column_blocks=2, blocks=4),
    ),
    "int8": ((66, 48, 256), LAST | {"dtype": INT8, "extras": NAMES}, Tiles(1, 32, 128, 2, blocks=2)),
    "fp8": ((66, 48, 384), LAST | {"dtype": FP8, "extras": NAMES}, Tiles(1, 32, 128, 2, blocks=2)),
}
SLOW = {
    "whole blocks of 128 x 256": ((256, 512, 128), {}, Tiles(2, 256, 64, 3, blocks=2)),
    "four consumers": ((300, 192, 64), {"extras": ("residual",)}, Tiles(4, 128, 64, 2, blocks=2)),
    "a cluster of two consumers": ((200, 80, 192), LAST, Tiles(2, 48, 64, 2, row_blocks=2, blocks=4)),
    "gated, two by two, of two consumers": (
        (300, 112, 192),
        LAST | {"gated": True},
        Tiles(2, 32, 64, 2, row_blocks=2, column_blocks=2, blocks=8),
    ),
    "float16": ((9, 96, 192), {"dtype": FP16, "result": FP16, "extras": WITHOUT_SCALES}, Tiles(1, 32, 128, 2)),
    "to float32": ((70, 80, 192), LAST | {"result": F32, "extras": ("bias",)}, Tiles(2, 96, 64, 2, blocks=2)),
    "float32, gated": ((70, 32, 64), {"result": F32, "gated": True, "extras": ("residual",)}, Tiles(1, 32, 64, 2)),
    "gated, in first": ((70, 192, 64), {"gated": True, "extras": WITHOUT_SCALES}, Tiles(2, 128, 64, 2, blocks=1)),
    "int8, gated": ((70, 80, 384), LAST | {"dtype": INT8, "gated": True, "extras": NAMES}, Tiles(2, 64, 128, 2)),
    "int8 to float32": (
        (70, 80, 384),
        LAST | {"dtype": INT8, "result": F32, "extras": ("x_scales",)},
        Tiles(2, 64, 128),
    ),
    "fp8, gated": (
        (70, 48, 128),
        LAST | {"dtype": FP8, "gated": True, "extras": NAMES},
        Tiles(2, 16, 128, 3, blocks=2),
    ),
    "fp8 to float16": ((130, 48, 384), LAST | {"dtype": FP8, "result": FP16, "extras": ("scales",)}, Tiles(4, 32, 128)),
    "panels": ((390, 96, 64), {}, Tiles(1, 32, 64, 2, panel=2, blocks=3)),
    "more blocks than units": ((3, 64, 64), {}, Tiles(1, 32, 64, 2, blocks=50)),
    "a ring longer than the work": ((3, 64, 64), {}, Tiles(1, 32, 64, 9, blocks=1)),
    "the heuristic's": ((3, 160, 192), {"extras": ("residual",)}, None),
}


def of_case(name):
    sizes, options, tiles = (CASES | SLOW)[name]
    product = {key: options[key] for key in ("layout", "gated") if key in options}
    return operands(*sizes, **options), product, {**product, "dtype": options.get("result", BF16)}, tiles


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES | SLOW]
)
def test_equals_float64(name):
    arrays, product, options, tiles = of_case(name)
    assert_close(run(arrays, tiles, **options), arrays, **product)


@pytest.mark.parametrize("spare", [1, 100])
def test_further_scales_of_rows_are_ignored(spare):
    """`token_quant.quantize` returns scales of whole tiles, see ``multiple``."""
    (x, weights, extras), product, options, tiles = of_case("int8")
    longer = extras._replace(x_scales=jnp.pad(extras.x_scales, (0, spare), constant_values=jnp.nan))
    np.testing.assert_array_equal(
        run((x, weights, longer), tiles, **options), run((x, weights, extras), tiles, **options)
    )
    plain = reference.matmul(x, weights, extras, **product)
    np.testing.assert_array_equal(reference.matmul(x, weights, longer, **product), plain)


EXACT = {
    "bias and residual": ({"extras": WITHOUT_SCALES}, Tiles(1, 32, 64, 2, blocks=2)),
    "gated": ({"extras": WITHOUT_SCALES, "gated": True}, Tiles(1, 32, 64, 2, blocks=2)),
    "int8": (LAST | {"dtype": INT8, "extras": NAMES}, Tiles(1, 32, 128, 2, blocks=2)),
}


@pytest.mark.parametrize("name", EXACT)
def test_every_step_is_rounded_as_if_it_were_a_program(name):
    """If sums are exact, the result is bitwise identical to separately rounded steps."""
    options, tiles = EXACT[name]
    x, weights, extras = operands(66, 96, 256, whole=True, **options)
    arrays = x, weights, extras._replace(bias=extras.bias.astype(F32) * 1.003)
    product = {key: options[key] for key in ("layout", "gated") if key in options}
    got = run(arrays, tiles, **product)
    want = reference.matmul(*arrays, **product, dtype=BF16).astype(BF16)
    assert (want != reference.matmul(*arrays, **product).astype(BF16)).any()
    np.testing.assert_array_equal(got, want)


# --------------------------------------------------------------------------------------------------------------
# Bitwise identity.

# Tilings of 300 rows, 192 outputs and 320 inputs. Sums of 64 inputs (a slot) are exact, because the interpreter adds
# them in the order of this processor; sums over slots are not: their magnitudes differ.
PIECES = (
    Tiles(1, 32, 64, 3, blocks=3),
    Tiles(2, 64, 64, 2, blocks=2),
    Tiles(1, 96, 64, 2, row_blocks=2, blocks=4),
    Tiles(4, 32, 64, 2, blocks=2),
    Tiles(1, 64, 64, 4, column_blocks=2, blocks=2),
    Tiles(2, 128, 64, 2, panel=1, blocks=5),
    Tiles(1, 64, 64, 3, row_blocks=2, column_blocks=2, blocks=4),
    Tiles(1, 32, 64, 2, row_blocks=4, blocks=8),
    Tiles(2, 32, 64, 2, column_blocks=4, blocks=4),
)
SIZES = {"n": 192, "k": 320}
SLOTS = np.exp2([0, -13, 5, -18, 9]).repeat(64)


@functools.cache
def many_rows():
    x, *rest = operands(301, **SIZES, extras=WITHOUT_SCALES, result=F32, whole=True)
    return x * jnp.asarray(SLOTS, x.dtype), *rest


def bits_of(rows, tiles, filler=None):
    """Return these rows' results in float32: fewer bits would hide a changed order of additions.

    Args:
        filler: value that replaces all rows except the last of `many_rows`.
    """
    x, weights, extras = many_rows()
    x = x[rows] if filler is None else jnp.where(rows[:, None] == 300, x[rows], filler)
    return run((x, weights, extras._replace(residual=extras.residual[rows])), tiles, dtype=F32)


alone = functools.cache(lambda: bits_of(np.array([300]), PIECES[0])[0])


def assert_same_bits(count, place, tiles):
    """Check that row ``place`` of ``count`` rows is bitwise identical to the row alone; all other rows are NaN."""
    got = bits_of(np.where(np.arange(count) == place, 300, 0), tiles, filler=jnp.nan)
    assert got[place].tobytes() == alone().tobytes()
    assert np.isnan(np.delete(got, place, axis=0)).all()


@pytest.mark.parametrize(
    ("count", "place", "piece"),
    [(1, 0, 1), (2, 1, 4), (64, 63, 0), (65, 64, 2), (300, 191, 5), (130, 129, 6), (300, 290, 7), (70, 3, 8)],
)
def test_no_bit_of_a_row_depends_on_others_their_number_or_its_place(count, place, piece):
    assert_same_bits(count, place, PIECES[piece])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 301, 20))
def test_no_bit_depends_on_any_number_of_rows(first):
    for count in range(first, first + 20):
        assert_same_bits(count, count * 37 % count if count % 3 else count - 1, PIECES[count % len(PIECES)])


@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP8, marks=pytest.mark.slow)])
def test_a_sum_goes_over_the_inputs_in_order(dtype):
    """A small term between two large ones that cancel is lost; after them it is kept."""
    x = np.zeros((2, 640), np.float32)
    x[:, [5, 400]] = 256.0, -256.0
    x[0, 200], x[1, 600] = 2.0**-6, 2.0**-6
    weights = np.zeros((16, 640), np.float32)
    weights[:, [5, 400]], weights[:, [200, 600]] = 256.0, 2.0**-6
    arrays = jnp.asarray(x, dtype), jnp.asarray(weights, dtype), Extras()
    for tiles in (Tiles(1, 16, 128, 2, blocks=1), Tiles(2, 32, 128, 3, blocks=2)):
        got = run(arrays, tiles, **LAST)
        np.testing.assert_array_equal(got, np.array([[0.0], [2.0**-12]] * np.ones((1, 16))))


def test_what_lies_beyond_the_operands_is_not_read():
    """Rows and outputs of a block beyond the operands are not read: no NaN of adjacent memory enters the result.

    The interpreter initialises result memory to NaN.
    """
    arrays = operands(3, 48, 64, extras=WITHOUT_SCALES, **LAST)
    assert_close(run(arrays, Tiles(2, 64, 64, 2, row_blocks=2, blocks=2), **LAST), arrays, **LAST)


def shape_of(rows, columns, panel=8):
    """Return the shape of a product with 22 x 6 output tiles and clusters of rows x columns blocks."""
    tiles = Tiles(1, 32, 64, 2, row_blocks=rows, column_blocks=columns, panel=panel, blocks=8)
    x, weights = (jax.ShapeDtypeStruct(dims, BF16) for dims in ((64 * 21 + 1, 64), (64, 32 * 5 + 8)))
    return launch._shape_of(x, weights, Extras(), "in first", False, None, tiles)


@pytest.mark.parametrize(("rows", "columns"), CLUSTERS)
@pytest.mark.parametrize("panel", [1, 3, 8])
def test_units_are_each_piece_once(rows, columns, panel):
    shape, found = shape_of(rows, columns, panel), set()
    for member in itertools.product(range(rows), range(columns)):
        for number in range(shape.row_units * shape.column_units):
            found.add(tuple(map(int, kernel.unit_at(shape, jnp.int32(number), *map(jnp.int32, member)))))
    assert found >= {(64 * row, 32 * column) for row in range(22) for column in range(6)}
    assert len(found) == shape.row_units * shape.column_units * rows * columns
    assert max(found) == (shape.padded_rows - 64, shape.padded_columns - 32)


class Operand(NamedTuple):
    """A fake ref: an index into it returns its name and the start offsets."""

    name: str

    @property
    def at(self):
        return self

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        return self.name, tuple(int(getattr(one, "start", one)) for one in index)


def copies_of(shape, member, monkeypatch):
    """Return source offsets and multicast axis of each copy by a cluster's block in step 0 of its fourth unit."""
    found = {}

    def copy(source, _slot, _ready, *, collective_axes):
        name, start = source
        found[name] = start, collective_axes

    monkeypatch.setattr(kernel.pl, "multiple_of", lambda number, _: number)
    monkeypatch.setattr(kernel.plgpu, "copy_gmem_to_smem", copy)
    gmem, smem, barriers = (made(*map(Operand, made._fields)) for made in (kernel.Gmem, kernel.Smem, kernel.Barriers))
    unit = kernel.unit_at(shape, jnp.int32(3), *map(jnp.int32, member))
    kernel._copy_step(shape, unit, 0, 0, gmem, smem, barriers)
    return found


@pytest.mark.parametrize(("rows", "columns"), CLUSTERS)
def test_what_is_read_for_others_is_what_they_need(rows, columns, monkeypatch):
    """Blocks along a multicast axis need the same data; a slot is free once the blocks of all axes release it.

    The interpreter cannot test this: there each block copies all its data itself.
    """
    shape, members = shape_of(rows, columns), list(itertools.product(range(rows), range(columns)))
    found = {member: copies_of(shape, member, monkeypatch) for member in members}
    alike = {"weights": [(row, 0) for row in range(rows)], "x": [(0, column) for column in range(columns)]}
    for name, others in alike.items():
        assert len({found[member][name] for member in others}) == 1
        assert len({found[member][name] for member in members}) == len(members) // len(others)
    axes = {axis for copies in found.values() for _, axis in copies.values() if axis}
    assert axes == {axis for axis, size in ((kernel.ROW_AXIS, rows), (kernel.COLUMN_AXIS, columns)) if size > 1}
    assert axes <= set(getattr(launch._barriers(shape).free, "collective_axes", ()))


# --------------------------------------------------------------------------------------------------------------
# Mutations and the cases that must then fail.

MUTATIONS = {
    "wait for copies": ("plgpu.barrier_wait(barriers.ready.at[slot])", "pass", "residual"),
    "wait for a free slot": (
        "pl.when(done + index >= stages)(functools.partial(await_free, done + index))",
        "pass",
        "plain",
    ),
    "wait for a copy out": ("plgpu.wait_smem_to_gmem(last if chunk else 0, wait_read_only=True)", "pass", "plain"),
    "wait for what is added": ("plgpu.barrier_wait(self._added(chunk))", "pass", "residual"),
    "wait before more is added": ("plgpu.wait_smem_to_gmem(1, wait_read_only=True)", "pass", "chunks"),
    "wait before the first is added": ("plgpu.wait_smem_to_gmem(0, wait_read_only=True)", "pass", "residual"),
    "a step's inputs": ("pl.multiple_of(index * tiles.depth, ", "pl.multiple_of(index * 0, ", "plain"),
    "the last step": (
        "pl.multiple_of(index * tiles.depth, ",
        "pl.multiple_of((index + index // (shape.steps - 1)) * tiles.depth, ",
        "plain",
    ),
    "the order of steps": (
        "pl.multiple_of(index * tiles.depth, ",
        "pl.multiple_of((shape.steps - 1 - index) * tiles.depth, ",
        "order",
    ),
    "a consumer's rows": (
        "own = pl.ds(pl.multiple_of(warpgroup * GROUP",
        "own = pl.ds(pl.multiple_of(0 * GROUP",
        "plain",
    ),
    "a unit's rows": ("rows = pl.ds(pl.multiple_of(unit.row, ", "rows = pl.ds(pl.multiple_of(unit.row * 0, ", "plain"),
    "a unit's columns": (
        "columns = pl.ds(pl.multiple_of(unit.column, ",
        "columns = pl.ds(pl.multiple_of(unit.column * 0, ",
        "plain",
    ),
    "a part of the weights": ("(part, columns, inputs)", "(0, columns, inputs)", "gated"),
    "gate and up": ("gate, up = parts", "up, gate = parts", "gated"),
    "a bias of gate for up": ("extras.bias.at[part, ", "extras.bias.at[0, ", "gated"),
    "a scale of gate for up": ("extras.scales.at[part, ", "extras.scales.at[0, ", "gated"),
    "a neighbour's scale": (
        "extras.x_scales.at[pl.ds(self.unit.row, GROUP)]",
        "extras.x_scales.at[pl.ds(self.unit.row * 0, GROUP)]",
        "gated",
    ),
    "what a neighbour adds": (
        "return ref.at[pl.ds(self.unit.row, GROUP)",
        "return ref.at[pl.ds(self.unit.row + 1 - 1 * (ref is self.gmem.output), GROUP)",
        "residual",
    ),
    "a chunk's columns": (
        "pl.multiple_of(self.unit.column + chunk * size, size)",
        "pl.multiple_of(self.unit.column, size)",
        "plain",
    ),
    "rounding of steps": ("return numbers.astype(self.shape.result).astype(jnp.float32)", "return numbers", "rounding"),
    "a member of a cluster's rows": ("tiles.row_blocks + row_member", "tiles.row_blocks", "cluster"),
    "a member of a cluster's columns": ("tiles.column_blocks + column_member", "tiles.column_blocks", "cluster"),
    "an order that follows from tiles": (
        "pl.multiple_of(index * tiles.depth, ",
        "pl.multiple_of((index if tiles.consumers == 1 else shape.steps - 1 - index) * tiles.depth, ",
        "bits",
    ),
    "a tile of a panel": ("(first + lax.rem(within, size))", "first", "plain"),
    "sums of float8": (
        "return tuple(one + other for one, other in zip(sums, some, strict=True))",
        "return some",
        "fp8",
    ),
}
MUTATED = {
    "plain": ((140, 208, 320), LAST, Tiles(2, 96, 64, 2, blocks=2)),
    "residual": ((70, 96, 128), {"extras": ("residual",)}, Tiles(1, 32, 64, 2, blocks=1)),
    "chunks": ((70, 256, 64), {"extras": ("residual",)}, Tiles(1, 256, 64, 2, blocks=1)),
    "gated": ((70, 80, 256), LAST | {"dtype": INT8, "gated": True, "extras": NAMES}, Tiles(1, 32, 128, 2, blocks=2)),
    "cluster": ((140, 64, 64), {}, Tiles(1, 32, 64, 2, row_blocks=2, column_blocks=2, blocks=4)),
    "fp8": ((3, 32, 384), LAST | {"dtype": FP8}, Tiles(1, 32, 128, 2, blocks=1)),
}
FAST_MUTATIONS = ("wait for copies", "the order of steps", "gate and up", "what a neighbour adds")


def caught_by(case):
    """Run the case of a mutation; raise if the kernel is wrong."""
    if case == "order":
        test_a_sum_goes_over_the_inputs_in_order(BF16)
    elif case == "bits":
        assert_same_bits(65, 3, PIECES[1])
    elif case == "rounding":
        test_every_step_is_rounded_as_if_it_were_a_program("bias and residual")
    else:
        sizes, options, tiles = MUTATED[case]
        product = {key: options[key] for key in ("layout", "gated") if key in options}
        arrays = operands(*sizes, **options)
        assert_close(run(arrays, tiles, **product), arrays, **product)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST_MUTATIONS else pytest.mark.slow) for name in MUTATIONS]
)
def test_a_mutation_is_caught(name, monkeypatch):
    old, new, case = MUTATIONS[name]
    source = inspect.getsource(kernel)
    assert old in source
    mutant = dict(kernel.__dict__)
    exec(compile(source.replace(old, new), kernel.__file__, "exec"), mutant)
    monkeypatch.setattr(launch, "body", mutant["body"])
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        caught_by(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MUTATED)
def test_without_a_mutation_all_is_well(case):
    caught_by(case)
