"""lora against its definition on the XLA path, with tiles of both kinds; which path is chosen, and why."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.choice import Target
from pallas_kernels.lora import explain, group, low_rank, mosaic, reference

CPU, AMPERE, HOPPER = Target("cpu"), Target("gpu", (8, 0)), Target("gpu", (9, 0))
SLOTS = 5


def numbers(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def operands(rows, *, k=64, rank=8, out=(4, 16), dtype="float32"):
    """Return rows, banks, and the slot of each row; one adapter has no rows, and its matrices are NaN."""
    slots = np.random.default_rng(0).choice([-1, 0, 1, 3, 4], rows)
    a, b = numbers(2, SLOTS, rank, k, dtype=dtype), numbers(3, SLOTS, *out, rank, dtype=dtype)
    return (
        numbers(1, rows, k, dtype=dtype),
        a.at[2].set(jnp.nan),
        b.at[2].set(jnp.nan),
        jnp.asarray(slots, jnp.int32),
    )


@pytest.mark.parametrize("rows", [1, 9, 70])
@pytest.mark.parametrize("tiles", ["mosaic", "xla"])
def test_every_row_meets_its_own_adapter(rows, tiles):
    x, a, b, slots = operands(rows)
    x = jnp.where((slots >= 0)[:, None], x, jnp.nan)

    @jax.jit
    def product(x, a, b, slots):
        return low_rank(x, a, b, group(slots, SLOTS, rows, path=tiles, target=CPU), path="xla", target=CPU)

    got = product(x, a, b, slots)
    assert got.shape == (rows, 4, 16)
    np.testing.assert_allclose(got, reference.low_rank(x, a, b, slots), rtol=0, atol=2e-4)
    assert not np.asarray(got)[np.asarray(slots) < 0].any()


@pytest.mark.parametrize("tiles", ["mosaic", "xla"])
def test_a_rows_bits_depend_on_no_other(tiles):
    x, a, b, slots = operands(40, dtype="bfloat16")

    @functools.partial(jax.jit, static_argnums=1)
    def product(slots, rows):
        return low_rank(x[:rows], a, b, group(slots, SLOTS, rows, path=tiles, target=CPU), path="xla", target=CPU)

    whole = np.asarray(product(slots, 40))
    one = int(np.argmax(np.asarray(slots) == 3))
    others = jnp.full_like(slots, 4).at[one].set(3)
    assert np.asarray(product(others, 40))[one].tobytes() == whole[one].tobytes()


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (CPU, "xla"),
        (Target("gpu", (7, 5)), "xla"),
        (AMPERE, "mosaic"),
        (Target("gpu", (8, 9)), "mosaic"),
        (HOPPER, "mosaic"),
        (Target("gpu", (10, 0)), "xla"),
        (Target("gpu"), "xla"),
        (Target("rocm", (9, 0)), "xla"),
    ],
)
def test_tiles_are_of_the_kind_that_the_path_wants(target, path):
    x, a, b, slots = operands(32)
    groups = group(slots, SLOTS, 32, target=target)
    assert explain(x, a, b, target=target).path == path
    assert explain(x, a, b, groups, target=target).path == path
    if path == "mosaic":
        assert groups.entries.shape[1] in mosaic.TILE_ROWS
        assert groups.experts is not None


@pytest.mark.parametrize("rows", [1, 8, 32, 512, 4096])
@pytest.mark.parametrize("count", [1, 8, 1024])
def test_the_kernels_take_all_tiles_that_are_made_for_them(rows, count):
    groups = jax.eval_shape(lambda: group(jnp.zeros(rows, jnp.int32), count, rows, path="mosaic", target=HOPPER))
    assert mosaic._groups_refusal(groups) is None


def test_what_the_kernels_refuse_takes_xla_over_their_tiles():
    x, a, b, slots = operands(9, k=60)
    groups = group(slots, SLOTS, 9, target=HOPPER)
    chosen = explain(x, a, b, groups, target=HOPPER)
    assert (chosen.path, "60 inputs" in chosen.why) == ("xla", True)
    got = low_rank(x, a, b, groups, target=HOPPER)
    np.testing.assert_allclose(got, reference.low_rank(x, a, b, slots), rtol=0, atol=2e-4)
    with pytest.raises(ValueError, match="60 inputs"):
        low_rank(x, a, b, groups, path="mosaic")


def test_weights_that_are_spread_over_devices_take_xla():
    x, a, b, slots = operands(32)
    for axes, path in ((((4, 1), "xla")), (((1, 1), "mosaic"))):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(axes, ("tensor", "data"))):
            chosen = explain(x, a, b, target=HOPPER)
            groups = jax.eval_shape(functools.partial(group, count=SLOTS, most=32, target=HOPPER), slots)
        assert chosen.path == path
        assert (groups.experts is None) == (path == "xla")
        assert ("spread over devices" in chosen.why) == (path == "xla")


@pytest.mark.parametrize(
    "change",
    [
        {"x": (3, 60)},
        {"a": (4, 8, 64)},
        {"a": (5, 8)},
        {"a": (5, 4, 64)},
        {"b": (5, 8)},
        {"b": (5, 4, 16, 7)},
    ],
)
def test_operands_that_do_not_fit_are_refused(change):
    shapes = {"x": (3, 64), "a": (5, 8, 64), "b": (5, 4, 16, 8), **change}
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values()]
    with pytest.raises(ValueError, match="do not fit"):
        explain(*given)


def by_path(path, x, a, b):
    slots = jnp.asarray([0, 3, -1, 4, 3, 0, 1, 3, 4], jnp.int32)
    product = low_rank(x, a, b, group(slots, SLOTS, 9, path="mosaic"), path=path)
    return (jnp.sin(product) * jnp.arange(64).reshape(4, 16)).sum()


def test_gradients_and_batches_take_the_xla_path_all_the_way():
    x, a, b, _ = operands(9)
    forced = functools.partial(by_path, "mosaic")
    of_each = ((forced, (x, a, b)), (jax.grad(forced, (0, 1, 2)), (x, a, b)))
    of_each += ((jax.vmap(forced, (0, None, None)), (x[None], a, b)),)
    kernel, gradients, batch = (str(jax.make_jaxpr(function)(*given)) for function, given in of_each)
    assert "name=lora_shrink" in kernel
    assert "name=lora" not in gradients
    assert "name=lora" not in batch


@pytest.mark.slow
def test_gradients_and_batches_of_the_kernels_path_are_those_of_the_xla_path():
    x, a, b, _ = operands(9)
    kernels, plain = (functools.partial(by_path, path) for path in ("mosaic", "xla"))
    got, expected = (jax.jit(jax.grad(one, (0, 1, 2)))(x, a, b) for one in (kernels, plain))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)
    both = jax.jit(jax.vmap(kernels, (0, None, None)))(jnp.stack([x, -x]), a, b)
    np.testing.assert_allclose(both, [plain(x, a, b), plain(-x, a, b)], rtol=1e-3)
