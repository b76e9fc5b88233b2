"""Matmuls with quantised weights: storage, the XLA path for every platform, and the path choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pallas_kernels import quant_matmul
from pallas_kernels.choice import Target
from pallas_kernels.grouped_matmul import group
from pallas_kernels.quant_matmul import fit, reference, xla
from tests.kernels.quant_cases import assert_close, operands, stack

CPU, GPU = Target("cpu"), Target("gpu", (7, 5))
KINDS = {
    "int4": {"group": 32},
    "int4-zeros": {"group": 64, "zeros": True},
    "int4-odd": {"k": 105, "n": 172, "group": 35, "zeros": True},
    "int4-channel": {"group": None},
    "int8": {"dtype": jnp.int8, "group": 64},
    "int8-zeros": {"dtype": jnp.int8, "group": None, "zeros": True},
    "int8-channel": {"dtype": jnp.int8, "group": None, "n": 600},
    "fp8": {"dtype": jnp.float8_e4m3fn, "group": 128},
    "fp8-channel": {"dtype": jnp.float8_e4m3fn, "group": None},
}


@pytest.mark.parametrize(
    ("rows", "target", "x_dtype"),
    [(1, CPU, "bfloat16"), (70, CPU, "float32"), (3, GPU, "float32"), (70, GPU, "bfloat16")],
)
@pytest.mark.parametrize("kind", KINDS)
def test_xla_equals_float64(kind, rows, target, x_dtype):
    arrays = operands(**{"rows": rows, "n": 320, "k": 256, **KINDS[kind]}, x_dtype=x_dtype)
    got = jax.jit(xla.matmul, static_argnames="target")(*arrays, target=target)
    # For many rows a GPU program rounds the weights to the dtype of x.
    weights_rounded = rows > xla.FEW_ROWS and target is GPU
    assert_close(got, arrays, within=2**-8 if weights_rounded else 1e-6)


@pytest.mark.parametrize("kind", ["int4-odd", "int8-zeros", "fp8"])
def test_many_rows_dequantize_in_pieces(kind, monkeypatch):
    """Slices have multiples of 64 channels except the last; a dequantised weight is never materialised whole."""
    arrays = operands(**{"rows": 70, "n": 320, "k": 256, **KINDS[kind]}, x_dtype="bfloat16")
    n, k = arrays[1].shape
    monkeypatch.setattr(xla, "GPU_PIECE", 100 * k * 2)
    product = jax.jit(xla.matmul, static_argnames="target")
    assert_close(product(*arrays, target=GPU), arrays, within=2**-8)
    plain = str(jax.make_jaxpr(lambda *arrays: xla.matmul(*arrays, target=GPU))(*arrays))
    assert f"bf16[{n},{k}]" not in plain
    assert f"bf16[64,{k}]" in plain
    # Without barriers XLA would dequantise several slices in one kernel.
    assert plain.count("= optimization_barrier") == -(-n // 64) - 1


def test_packed_weights_stand_for_the_plain_ones():
    rng = np.random.default_rng(0)
    numbers, zeros = jnp.asarray(rng.integers(0, 16, (64, 24))), jnp.asarray(rng.integers(0, 17, (2, 24)))
    scales = jnp.asarray(rng.uniform(0.1, 1, (2, 24)), jnp.float32)
    stored = quant_matmul.pack(numbers, scales, zeros, unsigned=True)
    assert (stored.weights.dtype, stored.weights.shape) == (jnp.int4, (24, 64))
    assert stored.zeros.dtype == jnp.int8
    plain = (numbers - jnp.repeat(zeros, 32, axis=0)) * jnp.repeat(scales, 32, axis=0)
    np.testing.assert_allclose(quant_matmul.dequantized(*stored).T, plain, rtol=1e-6)
    symmetric = quant_matmul.pack(numbers, scales, unsigned=True)
    np.testing.assert_allclose(
        quant_matmul.dequantized(*symmetric).T, (numbers - 8) * jnp.repeat(scales, 32, axis=0), rtol=1e-6
    )


def test_every_float8_is_read():
    """Subnormals, zeros of both signs and NaN are included."""
    stored = jnp.arange(256, dtype=jnp.uint8)
    numbers = jax.lax.bitcast_convert_type(stored, jnp.float8_e4m3fn).astype(jnp.float32)
    np.testing.assert_array_equal(jax.jit(xla._float8)(stored), numbers)


def test_what_does_not_fit_is_refused():
    x, weights, scales, zeros = operands(rows=2, zeros=True)
    with pytest.raises(ValueError, match="scales"):
        quant_matmul.explain(x, weights, scales[:, :-1])
    with pytest.raises(ValueError, match="zeros"):
        quant_matmul.explain(x, weights, scales, zeros[:1])
    with pytest.raises(ValueError, match="integers only"):
        quant_matmul.explain(x, weights.astype(jnp.float8_e4m3fn), scales, zeros)
    with pytest.raises(ValueError, match="do not fit"):
        quant_matmul.explain(x[:, :-1], weights, scales)
    with pytest.raises(ValueError, match="not stored"):
        quant_matmul.pack(weights.T, scales, dtype=jnp.int16)
    with pytest.raises(ValueError, match="float32"):
        quant_matmul.matmul(x.astype(jnp.float32), weights, scales, path="mosaic")


def test_leading_dimensions_are_kept():
    x, weights, scales, _ = operands(rows=6)
    flat = quant_matmul.matmul(x, weights, scales)
    np.testing.assert_array_equal(quant_matmul.matmul(x.reshape(2, 3, -1), weights, scales), flat.reshape(2, 3, -1))
    np.testing.assert_array_equal(quant_matmul.matmul(x[0], weights, scales).shape, (weights.shape[0],))


@pytest.mark.parametrize(
    ("options", "target", "path", "why"),
    [
        ({}, Target("gpu", (9, 0)), "mosaic", "does these operands"),
        ({}, Target("cpu"), "xla", "platform cpu"),
        ({}, Target("gpu", (8, 0)), "xla", "8.0"),
        ({"rows": 4000}, Target("gpu", (9, 0)), "mosaic", "does these operands"),
        ({"group": 16}, Target("gpu", (9, 0)), "xla", "16 inputs"),
        ({"group": 32, "dtype": jnp.int8, "rows": 65}, Target("gpu", (9, 0)), "xla", "of 8 bits"),
        ({"n": 192, "group": 256, "zeros": True}, Target("gpu", (9, 0)), "xla", "zeros of 192 channels"),
        ({"n": 172}, Target("gpu", (9, 0)), "xla", "multiple of 64 outputs"),
        ({"x_dtype": jnp.float32}, Target("gpu", (9, 0)), "xla", "float32"),
        ({"dtype": jnp.int8, "group": None}, Target("gpu", (9, 0)), "xla", "fuses"),
        ({"dtype": jnp.int8, "group": None, "zeros": True}, Target("gpu", (9, 0)), "mosaic", "does these operands"),
    ],
)
def test_the_path_and_why(options, target, path, why):
    chosen = quant_matmul.explain(*operands(**options), target=target)
    assert chosen.path == path
    assert why in chosen.why


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.int8])
@pytest.mark.parametrize("n", [896, 1536, 4096, 6144, 11008, 28672, 128256])
@pytest.mark.parametrize("k", [896, 4096, 8960, 11008, 14336])
def test_heuristic_tiles_fit_and_sums_do_not_depend_on_the_rows(dtype, n, k):
    found = set()
    for rows in (1, 8, 16, 33, 64, 65, 128, 200, 4096):
        x = jax.ShapeDtypeStruct((rows, k), jnp.bfloat16)
        rest = jax.ShapeDtypeStruct((n, k), dtype), jax.ShapeDtypeStruct((k // 128, n), jnp.bfloat16), None
        given = fit.of_rows(x, *rest)
        tiles = fit.heuristic_tiles(given)
        assert fit.refusal(given, tiles=tiles) is None
        shape = fit.shape_of(given, tiles)
        found.add((shape.span, shape.grain, tiles.splits))
    assert len(found) == 1


@pytest.mark.parametrize("rows", [8, 16, 64, 128])
@pytest.mark.parametrize(("n", "k"), [(5760, 2880), (2880, 2880), (28672, 4096), (4096, 14336), (1536, 2048), (64, 64)])
def test_heuristic_tiles_of_experts_fit(rows, n, k):
    x, codes = jax.ShapeDtypeStruct((96, rows, k), jnp.bfloat16), jax.ShapeDtypeStruct((32, n, k), jnp.int4)
    given = fit.Operands(x, codes, jax.ShapeDtypeStruct((k // 32, 32, n), jnp.uint8), None, e2m1=True, grouped=True)
    tiles = fit.heuristic_tiles(given)
    assert fit.refusal(given, tiles=tiles) is None
    assert tiles.splits == 1


@given(
    st.sampled_from([jnp.int4, jnp.int8, jnp.float8_e4m3fn]),
    st.sampled_from([32, 64, 128, 256, 384, None]),
    st.sampled_from([64, 128, 192, 320, 384, 896, 2880, 28672]),
    st.sampled_from([64, 128, 192, 256, 576, 768, 896, 1440, 2880, 4864, 11008]),
    st.sampled_from([1, 8, 64, 65, 128, 200, 2048]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=200)
def test_what_is_not_refused_has_tiles(dtype, group, n, k, rows, zeros, grouped):
    group = group or k
    assume(k % group == 0 and not (zeros and dtype == jnp.float8_e4m3fn))
    x, weights = jax.ShapeDtypeStruct((rows, k), jnp.bfloat16), jax.ShapeDtypeStruct((n, k), dtype)
    factors = [jax.ShapeDtypeStruct((k // group, n), kind) for kind in (jnp.bfloat16, jnp.int8)]
    operands = fit.of_rows(x, weights, factors[0], factors[1] if zeros else None)._replace(grouped=grouped)
    assume(fit.refusal(operands) is None)
    assert fit.refusal(operands, tiles=fit.heuristic_tiles(operands)) is None


@pytest.mark.parametrize("e2m1", [False, True])
@pytest.mark.parametrize("target", [CPU, GPU])
def test_tiles_by_xla_equal_the_products_of_their_experts(e2m1, target):
    weights = stack(3, n=64, group=64, zeros=not e2m1, e2m1=e2m1)
    ids = jnp.asarray([2, 0, 0, 2, 2])
    groups = group(ids, 3, 5)
    x = operands(rows=5, k=256)[0]
    rows = x.at[groups.entries].get(mode="fill", fill_value=0)
    tiles = quant_matmul.matmul_tiles(rows, *weights, groups, e2m1=e2m1, target=target)
    got = tiles.reshape(-1, 64)[groups.places]
    for row, expert in enumerate(ids):
        own = weights[1][:, expert], None if weights[2] is None else weights[2][:, expert]
        plain = x[row : row + 1], weights[0][expert], *own
        assert_close(got[row : row + 1], plain, within=2**-8 if e2m1 else 1e-6, e2m1=e2m1)


def test_the_path_of_experts_and_why():
    weights = stack(2, e2m1=True)
    x = jax.ShapeDtypeStruct((5, 256), jnp.bfloat16)
    hopper = Target("gpu", (9, 0))
    assert quant_matmul.explain_tiles(x, *weights, e2m1=True, target=hopper).path == "mosaic"
    assert (
        "float16"
        in quant_matmul.explain_tiles(
            jax.ShapeDtypeStruct((5, 256), jnp.float16), *weights, e2m1=True, target=hopper
        ).why
    )
    assert quant_matmul.explain_tiles(x, *stack(2, group=128), target=hopper).path == "mosaic"
    assert "16 inputs" in quant_matmul.explain_tiles(x, *stack(2, group=16), target=hopper).why
    with pytest.raises(ValueError, match="16 inputs"):
        quant_matmul.explain_tiles(x, *stack(2, group=16), path="mosaic", target=hopper)


def test_a_batch_of_products_with_experts_takes_the_xla_path():
    weights, ids = stack(3, n=64, e2m1=True), jnp.asarray([2, 0, 0, 2, 2])
    groups = group(ids, 3, 5, path="mosaic")
    x = operands(rows=5, k=256)[0]
    rows = x.at[groups.entries].get(mode="fill", fill_value=0)

    def product(rows):
        return quant_matmul.matmul_tiles(rows, *weights, groups, e2m1=True, target=Target("gpu", (9, 0)))

    twice = jax.vmap(product)(jnp.stack([rows, 2 * rows]))
    want = quant_matmul.matmul_tiles(rows, *weights, groups, e2m1=True, path="xla", target=GPU)
    np.testing.assert_allclose(twice[1].astype(np.float32), 2 * want.astype(np.float32), rtol=2**-7, atol=2**-5)


def test_no_whole_weight_is_dequantized_on_a_cpu():
    x, weights, scales, _ = operands(rows=8, n=2048, k=2048)
    program = jax.jit(xla.matmul).lower(x, weights, scales).compile()
    assert program.memory_analysis().temp_size_in_bytes < 1.5 * weights.size  # dequantised: 2 or 4 bytes each


def test_reference_is_the_equation():
    x, weights, scales, zeros = operands(zeros=True)
    got = reference.matmul(x, weights, scales, zeros)
    np.testing.assert_allclose(got, x.astype(jnp.float32) @ reference.dequantized(weights, scales, zeros).T, rtol=1e-4)
