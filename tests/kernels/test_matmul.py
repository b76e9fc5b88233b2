"""Dense matmuls: the XLA path for every platform, the path choice, and the tiles passed to the kernel."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.quant import dispatch
from pallas_kernels import matmul as dense
from pallas_kernels import rates, tiles
from pallas_kernels.choice import Choice, Target
from pallas_kernels.matmul import Extras, api, reference, xla
from pallas_kernels.matmul.arg_specs import SHIPPED, layer
from pallas_kernels.matmul.mosaic import launch
from pallas_kernels.matmul.types import COLUMNS, Tiles
from pallas_kernels.specs import H200
from tests.kernels.matmul_cases import BF16, F32, FP8, FP16, INT8, NAMES, assert_close, operands

H100 = Target("gpu", (9, 0), "NVIDIA H100 80GB HBM3")
LAST = {"layout": "in last"}
KINDS = {
    "plain": {},
    "in last": LAST,
    "float16, gated": {"dtype": FP16, "result": FP16, "gated": True, "extras": ("bias",)},
    "gated, in last": LAST | {"gated": True, "extras": ("bias", "residual")},
    "float32": {"dtype": F32, "result": F32, "extras": ("residual",)},
    "int8": LAST | {"dtype": INT8, "extras": NAMES},
    "fp8, gated": LAST | {"dtype": FP8, "gated": True, "extras": NAMES},
    "fp8, in first": {"dtype": FP8, "extras": ("scales",)},
}


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_xla_equals_float64(kind, rows):
    options = KINDS[kind]
    arrays = operands(rows, 72, 136, **options)
    product = {key: options[key] for key in ("layout", "gated") if key in options}
    assert_close(jax.jit(functools.partial(xla.matmul, **product))(*arrays), arrays, **product)


@pytest.mark.parametrize("kind", ["plain", "gated, in last", "int8"])
def test_xla_rounds_every_step_as_if_it_were_a_program(kind):
    options = KINDS[kind] | {"extras": ("bias", "residual")}
    arrays = operands(9, 72, 136, whole=True, **options)
    product = {key: options[key] for key in ("layout", "gated") if key in options}
    got = jax.jit(functools.partial(xla.matmul, **product))(*arrays)
    np.testing.assert_array_equal(got, reference.matmul(*arrays, **product, dtype=BF16).astype(BF16))


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_without_an_epilogue_xla_does_what_a_layer_does(dtype):
    """Bitwise identical, with two-dimensional rows and several output dimensions."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 3, 64)), dtype)
    first, last = (jnp.asarray(rng.normal(size=dims), dtype) for dims in ((64, 4, 8), (2, 24, 64)))
    np.testing.assert_array_equal(dense.matmul(x, first), dispatch.matmul(x, first))
    np.testing.assert_array_equal(dense.matmul(x, last, **LAST), dispatch.matmul_transposed(x, last))
    bias = jnp.asarray(rng.normal(size=(2, 24)), F32)
    want = jax.jit(lambda: dispatch.plus_bias(dispatch.matmul_transposed(x, last), bias))()
    np.testing.assert_array_equal(jax.jit(lambda: dense.matmul(x, last, Extras(bias=bias), **LAST))(), want)


def test_extras_have_the_rows_of_x():
    x, weights, extras = operands(6, 24, 64, extras=("bias", "residual"))
    flat = dense.matmul(x, weights, extras)
    split = extras._replace(residual=extras.residual.reshape(2, 3, 24))
    np.testing.assert_array_equal(dense.matmul(x.reshape(2, 3, 64), weights, split).reshape(6, 24), flat)


# --------------------------------------------------------------------------------------------------------------
# Path choice.


def measured(folder, *shapes):
    """Write a file of tuned tiles for weights of these shapes, layouts and gates; return a lookup in it."""
    keys = [api.matmul_key(jax.ShapeDtypeStruct((64, 1), BF16), weights, **how) for weights, how in shapes]
    best = tiles.Measured({"rows": 64}, {"columns": 32, "stages": 5}, {})
    entries = tuple(tiles.Entry(H100.device_kind, "matmul", key.options, {}, (best,)) for key in keys)
    (folder / "matmul").mkdir()
    (folder / "matmul/tiles.json").write_text(tiles.as_text(entries))
    return functools.partial(tiles.tuned, package=folder)


def test_the_kernel_is_taken_where_it_was_measured(tmp_path, monkeypatch):
    """The choice does not depend on the number of rows."""
    known, other = (jax.ShapeDtypeStruct((256, n), BF16) for n in (512, 544))
    monkeypatch.setattr(api, "tuned", measured(tmp_path, (known, {"layout": "in first", "gated": False})))
    for rows in (1, 64, 8192):
        x = jax.ShapeDtypeStruct((rows, 256), BF16)
        assert dense.explain(x, known, target=H100).path == "mosaic"
        assert "No tuned tiles" in dense.explain(x, other, target=H100).why
        assert "No tuned tiles" in dense.explain(x, jax.ShapeDtypeStruct((512, 256), BF16), target=H100, **LAST).why
        assert dense.explain(x, known, target=Target("gpu", (9, 0), "NVIDIA H200")).path == "xla"
        assert dense.explain(x, known, target=Target("gpu", (8, 0), "NVIDIA A100")).path == "xla"
        assert dense.explain(x, known).path == "xla"


def test_what_ships_leaves_all_to_xla():
    content = json.loads(tiles.tiles_file("matmul").read_text())
    assert (content["entries"], content["note"]) == ([], tiles.NOTE)
    x, weights = jax.ShapeDtypeStruct((8, 4096), BF16), jax.ShapeDtypeStruct((4096, 6144), BF16)
    assert dense.explain(x, weights, target=H100).path == "xla"
    assert dense.explain(x, weights, target=H100, path="mosaic").path == "mosaic"


def test_forced_to_the_kernel_it_is_one_launch_and_gradients_and_batches_are_xlas():
    x, weights, extras = operands(6, 32, 64, extras=("bias", "residual"))

    def by(path, x, weights, extras):
        return dense.matmul(x, weights, extras, path=path).astype(F32)

    kernel, plain = (functools.partial(by, path) for path in ("mosaic", "xla"))
    assert "matmul" in str(jax.make_jaxpr(kernel)(x, weights, extras))
    assert "dot_general" not in str(jax.make_jaxpr(kernel)(x, weights, extras))
    many = (jnp.stack([x, 2 * x]), weights, extras)
    batched = (jax.vmap(one, in_axes=(0, None, None))(*many) for one in (kernel, plain))
    np.testing.assert_array_equal(*batched)
    of_both = (
        jax.grad(lambda *given, one=one: jnp.sin(one(*given)).sum(), (0, 1, 2))(x, weights, extras)
        for one in (kernel, plain)
    )
    for got, want in zip(*map(jax.tree.leaves, of_both), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("x", "weights", "how", "why"),
    [
        ((BF16, 3, 64), (BF16, 64, 24), {}, "multiples of 64 and 32"),
        ((BF16, 3, 96), (BF16, 96, 32), {}, "96 inputs"),
        ((BF16, 3, 64), (BF16, 24, 64), LAST, "multiples of 64 and 16"),
        ((INT8, 3, 64), (INT8, 32, 64), LAST, "multiples of 128"),
        ((INT8, 3, 64), (INT8, 64, 32), {}, "[in, out]"),
        ((F32, 3, 64), (F32, 64, 32), {}, "float32"),
        ((BF16, 3, 64), (FP16, 64, 32), {}, "float16 weights times bfloat16"),
        ((BF16, 3, 64), (BF16, 64, 32), {"dtype": jnp.int32}, "int32"),
        ((BF16, 3, 64), (BF16, 64, 32), {"tiles": Tiles(columns=48)}, "lines of 32"),
        ((BF16, 3, 64), (BF16, 64, 96), {"tiles": Tiles(columns=64)}, "lines of 64"),
        ((BF16, 3, 64), (BF16, 96, 64), LAST | {"tiles": Tiles(columns=48, row_blocks=4)}, "cannot share"),
        ((BF16, 3, 64), (BF16, 64, 2, 32), {"gated": True, "tiles": Tiles(columns=160)}, "registers"),
        ((BF16, 3, 64), (BF16, 64, 256), {"tiles": Tiles(columns=256, stages=9)}, "shared memory"),
        ((FP8, 3, 128), (FP8, 32, 128), LAST | {"tiles": Tiles(depth=64)}, "lines of 128 bytes"),
        ((FP8, 3, 128), (FP8, 32, 128), LAST | {"tiles": Tiles(columns=192, depth=128)}, "registers"),
    ],
)
def test_refuses_what_it_cannot_do(x, weights, how, why):
    given = (jax.ShapeDtypeStruct(dims, dtype) for dtype, *dims in (x, weights))
    assert why in launch.refusal(*given, **how)


def test_refuses_scales_of_wide_numbers_and_a_residual_of_another_dtype():
    x, weights, _ = operands()
    assert "8 bits only" in launch.refusal(x, weights, Extras(scales=jnp.ones(64)))
    assert "float16" in launch.refusal(x, weights, Extras(residual=jnp.ones((3, 64), BF16)), dtype=FP16)
    with pytest.raises(ValueError, match="float16"):
        dense.matmul(x, weights, Extras(residual=jnp.ones((3, 64), BF16)), dtype=FP16, path="mosaic")


@pytest.mark.parametrize(
    ("weights", "extras", "how", "why"),
    [
        ((128, 64), Extras(), LAST, "do not fit"),
        ((128, 3, 64), Extras(), {"gated": True}, "not [2, n]"),
        ((128, 64), Extras(bias=(1, 64)), {}, "bias (1, 64)"),
        ((128, 2, 64), Extras(residual=(3, 2, 64)), {"gated": True}, "residual (3, 2, 64)"),
        ((128, 64), Extras(x_scales=(1,)), {}, "x_scales (1,)"),
    ],
)
def test_operands_that_do_not_fit_each_other(weights, extras, how, why):
    extras = Extras(*(None if dims is None else jnp.zeros(dims) for dims in extras))
    with pytest.raises(ValueError, match=re.escape(why)):
        dense.matmul(jnp.zeros((3, 128)), jnp.zeros(weights), extras, **how)


# --------------------------------------------------------------------------------------------------------------
# Tiles.


def test_tiles_of_impossible_numbers_are_refused():
    wrong = ({"consumers": 3}, {"columns": 40}, {"depth": 32}, {"row_blocks": 4, "column_blocks": 2}, {"row_blocks": 3})
    for fields in (
        *wrong,
        {"column_blocks": 8},
        {"row_blocks": 4, "blocks": 3},
        {"stages": 1},
        {"panel": 0},
        {"row_blocks": 2, "blocks": 1},
    ):
        with pytest.raises(ValueError, match=r"consumers|cluster|there"):
            Tiles(**fields)


SHAPES = ((4096, 6144), (4096, 4096), (14336, 4096), (896, 1152), (128, 32), (4096, 128256))


def heuristic(rows, inputs, columns, **how):
    dtype, gated = how.get("x", BF16), how.get("gated", False)
    outputs = (2, columns) if gated else (columns,)
    layout = how.get("layout", "in first")
    dims = (inputs, *outputs) if layout == "in first" else (*outputs, inputs)
    given = jax.ShapeDtypeStruct((rows, inputs), dtype), jax.ShapeDtypeStruct(dims, dtype)
    of = {"multiprocessors": how.get("multiprocessors", 132), "rates": how.get("rates")}
    found = launch.heuristic_tiles(*given, layout=layout, gated=gated, **of)
    assert launch.refusal(*given, layout=layout, gated=gated, tiles=found) is None
    return found


@pytest.mark.parametrize(
    "how", [{}, LAST, LAST | {"gated": True}, LAST | {"x": FP8}, LAST | {"x": INT8, "gated": True}]
)
@pytest.mark.parametrize("rows", [1, 64, 65, 256, 2048, 8192])
def test_heuristic_tiles_fit(rows, how):
    for inputs, columns in SHAPES:
        found = heuristic(rows, inputs, columns, **how)
        assert found.stages > 3
        assert found.consumers * 64 < rows + 64


def test_heuristic_tiles_are_narrow_for_few_rows_and_wide_for_many():
    assert heuristic(1, 4096, 4096).columns == 32
    assert (heuristic(64, 4096, 4096).columns, heuristic(64, 4096, 4096).column_blocks) == (32, 4)
    many = heuristic(8192, 4096, 6144)
    assert (many.consumers, many.columns, many.row_blocks) == (2, max(COLUMNS), 4)


LAYER = {
    "qkv": (4096, 6144, "in first", False),
    "out": (4096, 4096, "in first", False),
    "gate_up": (4096, 14336, "in last", True),
    "down": (14336, 4096, "in first", False),
    "head": (4096, 128256, "in last", False),
}
# Columns, consumers, row blocks and column blocks for 2, 8, 64, 256 and 2,048 rows of Llama-3.1-8B.
CHOSEN = {
    rates.H100: {
        "qkv": ((64, 1, 1, 1), (64, 1, 1, 1), (64, 1, 1, 4), (192, 1, 4, 1), (256, 2, 4, 1)),
        "out": ((32, 1, 1, 1), (32, 1, 1, 1), (32, 1, 1, 4), (128, 1, 2, 2), (256, 2, 4, 1)),
        "gate_up": ((128, 1, 1, 1), (128, 1, 1, 1), (128, 1, 1, 1), (128, 2, 2, 2), (128, 2, 4, 1)),
        "down": ((32, 1, 1, 1), (32, 1, 1, 1), (32, 1, 1, 4), (128, 1, 2, 2), (256, 2, 4, 1)),
        "head": ((256, 1, 1, 1), (256, 1, 1, 1), (256, 1, 1, 1), (256, 2, 2, 2), (256, 2, 4, 1)),
    },
    rates.H200: {
        "qkv": ((64, 1, 1, 1), (64, 1, 1, 4), (64, 1, 1, 4), (192, 1, 4, 1), (256, 2, 4, 1)),
        "out": ((32, 1, 1, 1), (32, 1, 1, 4), (32, 1, 1, 4), (128, 1, 2, 2), (256, 2, 4, 1)),
        "gate_up": ((16, 1, 1, 1), (16, 1, 1, 4), (128, 1, 1, 4), (128, 2, 2, 2), (128, 2, 4, 1)),
        "down": ((32, 1, 1, 1), (32, 1, 1, 2), (32, 1, 1, 4), (128, 1, 2, 2), (256, 2, 4, 1)),
        "head": ((256, 1, 1, 1), (256, 1, 1, 1), (256, 1, 1, 2), (256, 2, 2, 2), (256, 2, 4, 1)),
    },
}


@pytest.mark.parametrize("kind", CHOSEN)
def test_what_the_heuristic_chooses_for_a_device(kind):
    """Pins the current choices: a change affects what `check` compiles, and the predictions."""
    found = {}
    for name, (inputs, columns, layout, gated) in LAYER.items():
        of = {"layout": layout, "gated": gated, "rates": rates.rates_of(kind)}
        each = [heuristic(rows, inputs, columns, **of) for rows in (2, 8, 64, 256, 2048)]
        found[name] = tuple((one.columns, one.consumers, one.row_blocks, one.column_blocks) for one in each)
    assert found == CHOSEN[kind]


# MB of x and weights read through the L2 cache by all blocks, for 2, 64 and 256 rows.
TRAFFIC = {
    rates.H100: {
        "qkv": (52, 63, 117),
        "out": (36, 50, 101),
        "gate_up": (237, 294, 352),
        "down": (125, 176, 352),
        "head": (1059, 1313, 1577),
    },
    rates.H200: {
        "qkv": (52, 63, 117),
        "out": (36, 50, 101),
        "gate_up": (250, 250, 352),
        "down": (125, 176, 352),
        "head": (1059, 1182, 1577),
    },
}


def traffic(rows, inputs, columns, layout, gated, **of):
    """Return the bytes read: a cluster's blocks share reads; clusters read x for all columns, weights for all rows."""
    tiles, outputs = heuristic(rows, inputs, columns, layout=layout, gated=gated, **of), columns * (1 + gated)
    across = -(-columns // (tiles.columns * tiles.column_blocks))
    down = -(-rows // (tiles.rows * tiles.row_blocks))
    return 2 * inputs * (rows * across + outputs * down)


@pytest.mark.parametrize("kind", TRAFFIC)
def test_what_is_read_through_the_cache(kind):
    """Clusters of at most two would read 168, 134, 470 and 470 MB for a layer's four products at 256 rows."""
    found = {
        name: tuple(round(traffic(rows, *product, rates=rates.rates_of(kind)) / 1e6) for rows in (2, 64, 256))
        for name, product in LAYER.items()
    }
    assert found == TRAFFIC[kind]


@pytest.mark.parametrize("rows", [2, 64, 65, 256, 1000, 8192])
def test_clusters_of_four_run_together_and_no_block_of_one_has_zeros_alone(rows):
    """132 SMs hold 32 clusters of 4: a GPC of 18 leaves two over."""
    assert (Tiles(row_blocks=4).clusters, Tiles(column_blocks=2).clusters, Tiles().clusters) == (32, 66, 132)
    assert Tiles(row_blocks=2, column_blocks=2, blocks=8).clusters == 2
    for inputs, columns in SHAPES:
        found = heuristic(rows, inputs, columns)
        assert (found.row_blocks - 1) * found.rows < rows
        assert found.panel == {1: 8, 2: 8, 4: 4}[found.row_blocks]


def test_the_device_is_that_of_the_program():
    hopper = type("Hopper", (jax.sharding.AbstractDevice,), {"compute_capability": "9.0"})
    for kind, expected in {rates.H100: 1, rates.H200: 4, "NVIDIA H20": 1}.items():
        device = hopper(device_kind=kind, num_cores=132, platform="gpu")
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
            assert heuristic(8, 4096, 4096).column_blocks == expected


def test_what_an_h200_alone_chooses_is_compiled():
    """Every candidate of the 8B's decode steps and prompts has been compiled before it runs on a GPU."""
    compiled = {one.name for one in SHIPPED if H200 in one.targets}
    for rows in (1, 2, 8, 16, 32, 64, 128, 256, 512, 2048, 8192):
        for one in layer(rows):
            assert one.tiles(rates.H100) == one.tiles(rates.H200) or one.name in compiled


def test_tuned_tiles_are_taken(tmp_path, monkeypatch):
    x, weights, _ = operands(3, 64, 128)
    measured(tmp_path, (weights, {"layout": "in first", "gated": False}))
    monkeypatch.setattr(launch, "pick", functools.partial(tiles.pick, package=tmp_path, device_kind=H100.device_kind))
    seen = []
    monkeypatch.setattr(launch, "_launcher", lambda shape, *_: seen.append(shape.tiles) or (lambda *a: [x[:, :64]]))
    launch.matmul(x, weights)
    assert (seen[0].columns, seen[0].stages) == (32, 5)


def test_a_choice_says_why():
    assert dense.explain(*operands()[:2]) == Choice(
        "xla", "The program is lowered for platform cpu; Mosaic kernels are for GPUs."
    )
