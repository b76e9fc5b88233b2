"""Matmuls with quantised inputs against their definition, in numpy and float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.quant import Quantized, for_kernels, swiglu
from jaxinfer.quant.activations import by_gemm, product, rounded
from jaxinfer.quant.layouts import Grouped
from pallas_kernels.choice import AMPERE, HOPPER, Target
from pallas_kernels.matmul import xla
from tests.quant.examples import arrays_of

FP8 = "float8_e4m3fn"
INPUTS, OUT = 72, 20


def inputs(rows: int, k: int = INPUTS) -> np.ndarray:
    """Return tokens of very different magnitudes, one of zeros and one with an outlier."""
    x = np.random.default_rng(rows).standard_normal((rows, k)) * np.exp2(np.arange(rows) - 4)[:, None]
    x[rows // 2] = 0
    x[-1, 3] = 1e4
    return x.astype(np.float32)


def rounded_in_numpy(x: np.ndarray, kind: str, group: int, static: float | None = None) -> np.ndarray:
    """Quantise and dequantise inputs: each division and product in float32, as in the reference tool."""
    result = np.empty_like(x)
    for row in range(x.shape[0]):
        for first in range(0, x.shape[1], group or x.shape[1]):
            some = x[row, first : first + (group or x.shape[1])]
            most = np.float32(127.5 if kind == "int8" else 448)
            scale = np.maximum(abs(some).max(), np.float32(1e-30)) / most if static is None else np.float32(static)
            if kind == "int8":
                codes = np.clip(np.rint(some / scale), -128, 127)
            else:
                codes = np.clip(some / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            result[row, first : first + some.size] = codes.astype(np.float32) * scale
    return result


@pytest.mark.parametrize(("group", "jitted"), [(0, True), (0, False), (24, True), (32, True)])  # 32: the last has 8
@pytest.mark.parametrize("kind", ["int8", FP8])
def test_inputs_become_what_the_tool_makes_of_them(kind: str, group: int, jitted: bool) -> None:
    x, layout = inputs(40), Grouped(kind, INPUTS, activations=kind, activation_group=group)

    def plain(x: jax.Array) -> jax.Array:
        return rounded(x, layout).plain()

    found = (jax.jit(plain) if jitted else plain)(jnp.asarray(x))
    np.testing.assert_array_equal(found, rounded_in_numpy(x, kind, group))


@pytest.mark.parametrize("kind", ["int8", FP8])
def test_one_scale_for_all_tokens(kind: str) -> None:
    x, layout = inputs(9), Grouped(kind, INPUTS, activations=kind, static=True)
    found = jax.jit(lambda x: rounded(x, layout, jnp.float32(0.03)).plain())(jnp.asarray(x))
    np.testing.assert_array_equal(found, rounded_in_numpy(x, kind, 0, 0.03))


def test_every_float8_and_what_lies_between_two() -> None:
    """Ties round to even: a conversion through another dtype would round twice."""
    numbers = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(500))])
    layout = Grouped(FP8, x.size, activations=FP8, static=True)
    found = jax.jit(lambda x: rounded(x, layout, jnp.float32(1)).codes)(jnp.asarray(x)[None])
    np.testing.assert_array_equal(np.asarray(found)[0], x.astype(ml_dtypes.float8_e4m3fn))


LAYOUTS = {
    "int8": Grouped("int8", INPUTS, activations="int8"),
    "int8 with zeros": Grouped("int8", INPUTS, zeros=True, activations="int8"),
    "int8 with a factor": Grouped("int8", INPUTS, factor=1 / 127, activations="int8"),
    "int8, static": Grouped("int8", INPUTS, activations="int8", static=True),
    "int8 in groups": Grouped("int8", 24, zeros=True, activations="int8"),
    "fp8": Grouped(FP8, INPUTS, activations=FP8),
    "fp8, static": Grouped(FP8, INPUTS, scales="bfloat16", activations=FP8, static=True),
    "fp8 in blocks": Grouped(FP8, 24, activations=FP8, activation_group=24),
    "fp8 in partial blocks": Grouped(FP8, 8, activations=FP8, activation_group=32),
}


@pytest.mark.parametrize(("name", "rows"), [*((name, 9) for name in LAYOUTS), ("int8 with zeros", 1)])
def test_a_product(name: str, rows: int) -> None:
    layout, x = LAYOUTS[name], inputs(rows)
    arrays = arrays_of(layout, (OUT,), INPUTS, np.random.default_rng(0))
    if layout.static:
        arrays["input_scale"] = np.float32(0.03)
    weight = np.asarray(layout.dequantize({part: jnp.asarray(arrays[part]) for part in layout.parts(INPUTS)}))
    static = 0.03 if layout.static else None
    plain = rounded_in_numpy(x, layout.activations, layout.activation_group, static).astype(np.float64)
    expected = plain @ weight.astype(np.float64).T
    found = jax.jit(lambda x, arrays: product(x, layout, arrays))(jnp.asarray(x), arrays)
    size = abs(plain) @ abs(weight.astype(np.float64)).T
    np.testing.assert_array_less(abs(found - expected), 1e-6 * size + 1e-30)


@pytest.mark.parametrize("name", ["int8", "fp8 in blocks"])
def test_a_product_in_bfloat16_has_that_dtype(name: str) -> None:
    layout, x = LAYOUTS[name], jnp.asarray(inputs(3), jnp.bfloat16)
    arrays = arrays_of(layout, (OUT,), INPUTS, np.random.default_rng(0))
    found = jax.jit(lambda x, arrays: product(x, layout, arrays))(x, arrays)
    assert found.dtype == jnp.bfloat16
    expected = product(x.astype(jnp.float32), layout, {part: jnp.asarray(array) for part, array in arrays.items()})
    np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=0.02 * float(abs(expected).max()))


@pytest.mark.parametrize("size", [0.5, 1e6])
def test_outliers_are_not_rounded(size: float) -> None:
    layout, x = Grouped("int8", INPUTS, activations="int8", int8_steps=127.0, outliers=size), inputs(9)
    arrays = arrays_of(layout, (OUT,), INPUTS, np.random.default_rng(0))
    found = jax.jit(lambda x, arrays: product(x, layout, arrays))(jnp.asarray(x), arrays)
    large = abs(x) >= size
    small = np.where(large, np.float32(0), x)
    scale = np.maximum(abs(small).max(-1, keepdims=True), np.float32(1e-30)) / np.float32(127)
    plain = np.where(large, x, np.rint(small / scale) * scale).astype(np.float64)
    weight = (arrays["codes"].astype(np.float32) * arrays["scales"]).astype(np.float64)
    np.testing.assert_array_less(abs(found - plain @ weight.T), 1e-6 * (abs(plain) @ abs(weight).T) + 1e-30)
    assert large.any() == (size < 1)


def test_a_bound_of_what_scales_are_made_of() -> None:
    """fbgemm's ``activation_scale_ub``: a scale is min(largest, bound) / 448; values are clipped to the bound."""
    x, bound = inputs(9), 12.5
    found = jax.jit(lambda x: rounded(x, Grouped(FP8, INPUTS, activations=FP8, activation_bound=bound)).plain())(x)
    expected = rounded_in_numpy(np.clip(x, -bound, bound), FP8, 0)
    np.testing.assert_array_equal(found, expected)
    assert (float(abs(found).max()), float(abs(x).max())) == (bound, 1e4)
    beside = rounded(jnp.asarray(x[:4]), Grouped(FP8, INPUTS, activations=FP8)).plain()
    np.testing.assert_array_equal(found[:4], beside)  # tokens within the bound


@pytest.mark.parametrize("kind", ["int8", FP8])
def test_a_scale_is_that_of_all_devices_parts(kind: str) -> None:
    x, layout = jnp.asarray(inputs(9)), Grouped(kind, INPUTS, activations=kind)
    parts = jnp.stack(jnp.split(x, 3, axis=1))
    found = jax.vmap(lambda part: rounded(part, layout, along="x").plain(), axis_name="x")(parts)
    np.testing.assert_array_equal(jnp.concatenate(found, axis=1), rounded(x, layout).plain())


def test_a_token_does_not_depend_on_the_others() -> None:
    layout, x = LAYOUTS["int8 with zeros"], inputs(9)
    arrays = arrays_of(layout, (OUT,), INPUTS, np.random.default_rng(0))
    run = jax.jit(lambda x, arrays: product(x, layout, arrays))
    np.testing.assert_array_equal(run(x, arrays)[4:5], run(x[4:5], arrays))


@pytest.mark.parametrize("rows", [1, 8])
def test_integers_are_not_converted(rows: int) -> None:
    """The weight is not copied to a wider dtype: the program needs less memory than the weight."""
    layout, k = Grouped("int8", 1024, activations="int8"), 1024
    arrays = {"codes": jnp.zeros((k, k), jnp.int8), "scales": jnp.ones((k, 1), jnp.float32)}
    compiled = jax.jit(lambda x, arrays: product(x, layout, arrays)).lower(jnp.ones((rows, k)), arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < k * k // 2


# --------------------------------------------------------------------------------------------------------------
# With the kernel of `pallas_kernels.matmul`.

WIDE = 128


def weight_of(layout: Grouped, *out: int) -> Quantized:
    arrays = {
        name: jnp.asarray(array) for name, array in arrays_of(layout, out, WIDE, np.random.default_rng(1)).items()
    }
    if layout.static:
        arrays["input_scale"] = jnp.float32(0.03)
    return Quantized(arrays, layout, (*(None for _ in out), None), "bfloat16", WIDE)


@pytest.mark.parametrize(
    ("changes", "path", "gated", "capability", "expected"),
    [
        ({}, "mosaic", False, HOPPER, True),
        ({}, "mosaic", True, HOPPER, True),
        ({"outliers": 6.0}, "mosaic", False, HOPPER, True),
        ({"outliers": 6.0}, "mosaic", True, HOPPER, False),
        ({}, "auto", False, HOPPER, False),  # no tuned tiles
        ({}, "xla", False, HOPPER, False),
        ({}, "mosaic", False, AMPERE, False),
    ],
)
def test_where_the_kernel_multiplies(monkeypatch, changes, path, gated, capability, expected) -> None:
    monkeypatch.setattr("pallas_kernels.matmul.api.lowering_target", lambda: Target("gpu", capability))
    layout = Grouped("int8", WIDE, activations="int8", **changes)
    weight = weight_of(layout, 2, 32)
    assert by_gemm(jax.ShapeDtypeStruct((3, WIDE), jnp.bfloat16), layout, weight.arrays, path, gated=gated) == expected


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", ["int8", FP8])
def test_what_the_kernel_is_given_is_the_same_product(monkeypatch, kind: str, static: bool) -> None:
    """XLA replaces the kernel. Integer sums are exact, so results are bitwise identical."""
    x, layout = jnp.asarray(inputs(9, WIDE), jnp.bfloat16), Grouped(kind, WIDE, activations=kind, static=static)
    weight = weight_of(layout, 2, 32)
    plain, gated = jax.jit(weight.matmul)(x), jax.jit(lambda x: swiglu(x, weight))(x)
    given: list[bool] = []

    def xla_product(*operands: object, gated: bool, path: str, **options: object) -> jax.Array:
        given.append(gated)
        return xla.matmul(*operands, gated=gated, **options)

    monkeypatch.setattr("jaxinfer.quant.activations.by_gemm", lambda *_, **__: True)
    monkeypatch.setattr("jaxinfer.quant.activations.dense_matmul.matmul", xla_product)
    found = jax.jit(weight.matmul)(x), jax.jit(lambda x: swiglu(x, weight))(x)
    assert given == [False, True]
    for got, want in zip(found, (plain, gated), strict=True):
        assert got.shape == want.shape
        largest = float(jnp.abs(want.astype(jnp.float32)).max())
        difference = jnp.abs(got.astype(jnp.float32) - want.astype(jnp.float32)).max()
        assert difference <= (0 if kind == "int8" else 0.02 * largest)


def test_weights_in_the_form_of_the_kernel() -> None:
    layout = Grouped("int8", WIDE, scales="bfloat16", activations="int8")
    weight = weight_of(layout, 2, 32)
    made = for_kernels(weight, "mosaic")
    assert (made.path, made.arrays["scales"].dtype, made.layout.scales) == ("mosaic", jnp.float32, "float32")
    np.testing.assert_array_equal(made.arrays["scales"], weight.arrays["scales"].astype(jnp.float32))
    assert made.arrays["codes"] is weight.arrays["codes"]
    shapes = for_kernels(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), weight), "mosaic")
    assert jax.tree.map(lambda a: (a.shape, a.dtype), made) == jax.tree.map(lambda a: (a.shape, a.dtype), shapes)
    assert for_kernels(weight, "xla") is weight


@pytest.mark.parametrize(
    "layout",
    [
        Grouped("int8", WIDE, zeros=True, activations="int8"),
        Grouped("int8", 32, activations="int8"),
        Grouped(FP8, 32, activations=FP8, activation_group=32),
    ],
)
def test_other_weights_are_left_to_xla(layout: Grouped) -> None:
    weight = weight_of(layout, 32)
    assert for_kernels(weight, "mosaic") is weight
