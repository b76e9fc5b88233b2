"""Matmuls whose reduction is split where XLA would pad the operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.choice import HOPPER, Target
from pallas_kernels.sums import dot, parts

FEW, INPUTS, OUTPUTS = 3, 2880, 40  # 2880 = 64 x 45


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr("pallas_kernels.sums.lowering_target", lambda: Target("gpu", HOPPER))


def operands(dtype, along):
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((2, FEW, INPUTS)) * 9, rng.standard_normal((INPUTS, 2, OUTPUTS)) * 9
    weights = weights if along == 0 else np.moveaxis(weights, 0, -1)
    return jnp.asarray(x).astype(dtype), jnp.asarray(weights).astype(dtype)


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((64, 10944, 2048), 12),  # a layer of DeepSeek-V2-Lite: XLA splits by 16 x 8, which does not divide 10944
        ((1, 10944, 2048), 12),
        ((64, 5472, 2048), 12),
        ((64, 2880, 32), 20),  # gpt-oss' router
        ((64, 2688, 64), 21),
        ((64, 10944, 4096), 1),  # XLA splits by 8
        ((1024, 10944, 2048), 1),
        ((64, 2880, 5120), 1),
        ((64, 2880, 201088), 1),
        ((64, 11008, 2048), 1),
        ((64, 2048, 64), 1),
        ((64, 128, 64), 1),
        ((256, 3420, 1280), 9),  # Qwen2.5-VL-7B's tower: neither rows nor parts start at a 16-byte boundary
        ((1024, 3420, 1280), 3),
        ((4096, 3420, 1280), 1),
        ((64, 3696, 8192), 3),  # an eighth of Qwen2.5-72B's
        ((64, 8 * 367, 32), 1),  # a prime
    ],
)
def test_sums_are_divided_where_powers_of_two_do_not_divide(shape, found):
    assert parts(*shape) == found


def test_of_smaller_numbers_a_part_has_more():
    assert parts(64, 2816, 128, aligned=8) == 1  # by 32
    assert parts(64, 2816, 128, aligned=16) == 22


@pytest.mark.parametrize("along", [0, 2])
@pytest.mark.parametrize(("dtype", "result"), [("float32", None), ("bfloat16", None), ("int8", "int32")])
def test_a_divided_product(along, dtype, result, on_a_gpu):
    x, weights = operands(dtype, along)
    exact = np.tensordot(np.asarray(x, np.float64), np.asarray(weights, np.float64), ((2,), (along,)))
    found = jax.jit(dot, static_argnums=(2, 3))(x, weights, along, result)
    assert found.dtype == (result or dtype)
    within = {"float32": 1e-6, "bfloat16": 2**-8, "int8": 0}[dtype]
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=within, atol=within * np.abs(exact).max())
    (product,) = (one for one in jax.make_jaxpr(lambda *both: dot(*both, along))(x, weights).eqns if "dot" in str(one))
    aligned = 16 // x.dtype.itemsize
    assert product.outvars[0].aval.shape == (parts(6, INPUTS, 80, aligned), 2, FEW, 2, OUTPUTS)
    assert product.outvars[0].aval.dtype == (result or "float32")


@pytest.mark.parametrize("along", [0, 2])
def test_on_a_cpu_a_product_is_one(along):
    x, weights = operands("bfloat16", along)
    (product,) = jax.make_jaxpr(lambda *both: dot(*both, along))(x, weights).eqns
    assert (product.primitive.name, product.outvars[0].aval.dtype) == ("dot_general", "bfloat16")


def test_what_devices_share_is_not_divided_again(on_a_gpu):
    shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in operands("bfloat16", 0)]
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("tensor",))):
        (product,) = jax.make_jaxpr(lambda *both: dot(*both, 0))(*shapes).eqns
    assert product.primitive.name == "dot_general"


def test_what_is_one_devices_own_is_divided(on_a_gpu):
    x, weights = (jax.ShapeDtypeStruct(one.shape, one.dtype) for one in operands("bfloat16", 0))
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("tensor",))):
        own = jax.shard_map(lambda *both: dot(*both, 0), in_specs=P(), out_specs=P(), check_vma=False)
        text = str(jax.make_jaxpr(own)(x, weights))
    assert f"f32[{parts(6, INPUTS, 80)},2,3,2,40]" in text
