"""Products of few rows on a CPU, by the compiled C kernel."""

import functools
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import few_rows, sums
from pallas_kernels.choice import HOPPER, Target
from pallas_kernels.few_rows import api, native

pytestmark = pytest.mark.skipif(few_rows.unavailable() is not None, reason=str(few_rows.unavailable()))

DTYPES = ("float32", "bfloat16", "float16")
# Inputs and outputs: fewer outputs than a tile, than a chunk, and not a multiple of either; sums of one step and many.
SHAPES = ((16, (3,)), (256, (7,)), (768, (33,)), (896, (3, 130)), (64, (2, 5, 97)))


def operands(dtype, inputs, outputs, rows=8):
    rng = np.random.default_rng(inputs)
    x, weights = rng.standard_normal((rows, inputs)), rng.standard_normal((*outputs, inputs))
    return jnp.asarray(x).astype(dtype), jnp.asarray(weights).astype(dtype)


def bits(array):
    return np.asarray(array).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_products_are_rounded_once(dtype, inputs, outputs):
    """The bound excludes a lost input and a 16-bit sum: half a unit in the last place of the result plus the error of
    float32 sums."""
    x, weights = operands(dtype, inputs, outputs)
    found = jax.jit(few_rows.dot)(x[:, None], weights)
    wide, by = (np.asarray(array.astype(jnp.float32), np.float64) for array in (x, weights))
    expected = np.tensordot(wide, by, ((1,), (len(outputs),)))[:, None]
    assert (found.dtype, found.shape) == (x.dtype, expected.shape)
    off = np.abs(np.asarray(found.astype(jnp.float32)) - expected)
    bound = 1e-6 * np.tensordot(abs(wide), abs(by), ((1,), (len(outputs),)))[:, None]
    assert (off <= 0.5 * float(jnp.finfo(dtype).eps) * np.abs(expected) + bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_no_bit_of_a_row_depends_on_others(dtype, inputs, outputs):
    """Each number of rows, and each row alone; the others are NaN in one program."""
    x, weights = operands(dtype, inputs, outputs, api.MOST_ROWS)
    dot = jax.jit(few_rows.dot)
    whole = dot(x, weights)
    for rows in (1, 2, 3, 4, 5, 7, 8, 16, 31, 32):
        assert bits(dot(x[:rows], weights)) == bits(whole[:rows])
    for row in range(8):
        assert bits(dot(x[row : row + 1], weights)) == bits(whole[row : row + 1])
        hostile = jnp.full_like(x, jnp.nan).at[row].set(x[row])
        assert bits(dot(hostile, weights)[row]) == bits(whole[row])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_results_are_rounded_to_the_nearest_even_number(dtype):
    """Also those too large, infinite or not a number."""
    x, weights = operands(dtype, 256, (500,))
    most = float(jnp.finfo(dtype).max)
    scales = jnp.asarray([1, 1e-6, 3e3, most / 4, most, jnp.inf, jnp.nan, 0], dtype)[:, None]
    wide = few_rows.dot(x * scales, weights, jnp.float32)
    with np.errstate(all="ignore"):
        expected = np.asarray(wide).astype(jnp.dtype(dtype))
    found = few_rows.dot(x * scales, weights)
    np.testing.assert_array_equal(np.asarray(found, np.float32), expected.astype(np.float32))


def test_a_half_is_rounded_to_the_even_number():
    ones = jnp.ones((1, 16), jnp.bfloat16)
    numbers = np.zeros((4, 16), np.float32)
    numbers[:, 0], numbers[:, 1] = 256, (1, 3, -1, 1.5)  # bfloat16 has 256, 258, 260
    found = few_rows.dot(ones, jnp.asarray(numbers, jnp.bfloat16))
    assert np.asarray(found, np.float32).tolist() == [[256, 260, 255, 258]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_a_product(dtype):
    x, weights = operands(dtype, 256, (6,), rows=3)

    def loss(dot, x, weights):
        return (dot(x, weights).astype(jnp.float32) ** 2).sum()

    plain = functools.partial(jnp.einsum, "rk,nk->rn", precision="highest")
    for found, expected in zip(
        *(jax.jit(jax.grad(functools.partial(loss, dot), (0, 1)))(x, weights) for dot in (few_rows.dot, plain)),
        strict=True,
    ):
        tolerance = 1e-4 if dtype == "float32" else 5e-2
        np.testing.assert_allclose(
            *(np.asarray(each, np.float32) for each in (found, expected)), rtol=tolerance, atol=20 * tolerance
        )
    _, tangent = jax.jvp(functools.partial(few_rows.dot, weights=weights), (x,), (x,))
    np.testing.assert_allclose(*(np.asarray(each, np.float32) for each in (tangent, few_rows.dot(x, weights))), 1e-2)


def test_a_batch_of_calls_is_one_after_the_other():
    x, weights = operands("float32", 64, (5,))
    together = jax.jit(jax.vmap(few_rows.dot, (0, None)))(x.reshape(4, 2, 64), weights)
    np.testing.assert_array_equal(together.reshape(8, 5), few_rows.dot(x, weights))


def test_no_program_writes_a_weight_down():
    x, weights = operands("bfloat16", 768, (1024,), rows=4)
    compiled = jax.jit(few_rows.dot).lower(x, weights).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= weights.nbytes / 8


REFUSED = {
    "many rows": ((65, 64), (8, 64), jnp.bfloat16, 1),
    "inputs": ((1, 72), (8, 72), jnp.bfloat16, 1),
    "inputs first": ((1, 64), (64, 8), jnp.bfloat16, 0),
    "int8": ((1, 64), (8, 64), jnp.int8, 1),
    "no rows": ((0, 64), (8, 64), jnp.bfloat16, 1),
}


def test_which_products_it_computes(monkeypatch):
    for rows, weights, dtype, along in REFUSED.values():
        x, by = jax.ShapeDtypeStruct(rows, dtype), jax.ShapeDtypeStruct(weights, dtype)
        assert few_rows.refusal(x, by, along) is not None
    x, by = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 4, 64), (8, 3, 64)))
    assert few_rows.refusal(x, by, 2) is None
    assert few_rows.refusal(x, jax.ShapeDtypeStruct((8, 64), jnp.float32), 1) is not None
    monkeypatch.setattr(api, "lowering_target", lambda: Target("gpu", HOPPER))
    assert few_rows.refusal(x, by, 2) is not None


@pytest.mark.parametrize(
    ("dtype", "amx", "most"), [("float32", True, 64), ("bfloat16", False, 64), ("bfloat16", True, 8)]
)
def test_a_product_of_few_rows_is_the_kernels(monkeypatch, dtype, amx, most):
    monkeypatch.setattr(native, "has_amx", lambda: amx)
    assert few_rows.most_rows(dtype) == most
    x, weights = operands(dtype, 256, (40,), most + 1)
    for rows in (most, most + 1):
        text = jax.jit(functools.partial(sums.dot, along=1)).lower(x[:rows], weights).as_text()
        assert (native.TARGET in text) == (rows == most)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [("fpu avx512_bf16 amx_bf16 amx_tile", True), ("fpu avx512_bf16", False), ("amx_bf16x", False), (None, False)],
)
def test_matrix_registers_of_a_processor(tmp_path, flags, wanted):
    file = tmp_path / "cpuinfo"
    if flags is not None:
        file.write_text(f"processor\t: 0\nbugs\t\t: amx_bf16\nflags\t\t: {flags}\n")
    assert few_rows.has_amx(file) == wanted


@pytest.fixture
def loading(monkeypatch, tmp_path):
    """Return the function that loads the library anew, with an empty folder; the process keeps its own library."""
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, **__: None)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield native._loaded.__wrapped__
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_library_is_compiled_once(loading, monkeypatch, tmp_path):
    library, why = loading()
    assert why is None
    assert library.few_rows
    (kept,) = (tmp_path / "native").iterdir()
    monkeypatch.setattr(native.subprocess, "run", None)
    assert loading()[1] is None
    monkeypatch.setattr(native, "_SOURCE", copy := tmp_path / "other.c")
    shutil.copy(pathlib.Path(native.__file__).with_name("few_rows.c"), copy)
    assert loading()[1] is None  # the same source
    copy.write_text(copy.read_text() + "\n")
    with pytest.raises(TypeError):
        loading()
    assert kept.suffix == ".so"


def test_a_machine_without_a_compiler(loading, monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
    assert loading() == (None, "no C compiler (cc, gcc, clang) is installed")
    monkeypatch.setattr(native, "_loaded", lambda: (None, "no C compiler"))
    x, weights = operands("bfloat16", 300, (3, 5), rows=1)
    dot = jax.jit(functools.partial(sums.dot, along=2))
    two = jnp.concatenate([x, jnp.zeros_like(x)])
    np.testing.assert_array_equal(
        dot(x, weights), dot(two, weights)[:1]
    )  # a single row would take twenty times as long
    np.testing.assert_array_equal(dot(x[0], weights), dot(two, weights)[0])
    assert "tensor<2x300xbf16>" in dot.lower(x, weights).as_text()


def test_a_compiler_that_fails(loading, monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_SOURCE", bad := tmp_path / "bad.c")
    bad.write_text("no C")
    library, why = loading()
    assert library is None
    assert "bad.c" in why
    assert not list((tmp_path / "native").glob("*.so"))
