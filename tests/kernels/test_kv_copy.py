"""Page copies within a pool against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_copy
from pallas_kernels.choice import Target
from pallas_kernels.kv_copy import reference

PAGES = 12


def pool(dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((PAGES, 2, 2, 4, 8), np.float32)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([0, 3], [5, 6]),
        ([7, 7, 7], [1, 2, 3]),  # one page to several
        ([1, 2], [PAGES, 0]),  # target out of range: dropped
        ([4, PAGES, PAGES], [9, PAGES, PAGES]),
    ],
)
def test_copies_are_those_of_the_reference(source, target, dtype):
    before = pool(dtype)
    arguments = jnp.array(source), jnp.array(target)
    got = np.asarray(jax.jit(kv_copy.copy_pages)(before, *arguments))
    want = np.array(before)
    for one, other in zip(source, target, strict=True):
        if other < PAGES:
            want[other] = before[one]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(reference.copy_pages(before, *arguments), want)


def test_sources_are_read_before_anything_is_written():
    before = pool()
    swapped = jax.jit(kv_copy.copy_pages)(before, jnp.array([2, 8]), jnp.array([8, 2]))
    np.testing.assert_array_equal(swapped[2], before[8])
    np.testing.assert_array_equal(swapped[8], before[2])


def test_copies_stay_in_place():
    large, ids = jnp.zeros((400, 2, 2, 16, 8)), jnp.zeros((8,), jnp.int32)
    program = jax.jit(kv_copy.copy_pages, donate_argnums=0).lower(large, ids, ids).compile()
    assert program.memory_analysis().alias_size_in_bytes == large.nbytes
    assert program.memory_analysis().temp_size_in_bytes < large.nbytes // 4


def with_scales(scales: str) -> tuple[jax.Array, ...]:
    numbers = pool().astype(jnp.int8)
    return numbers, jnp.arange(float(numbers[..., 0].size if scales == "token" else PAGES * 4)).reshape(
        numbers.shape[: 4 if scales == "token" else 3]
    )


@pytest.mark.parametrize("scales", ["token", "head"])
def test_scales_are_copied_with_their_pages(scales):
    before, ids = with_scales(scales), (jnp.array([3, 5, 7]), jnp.array([5, 3, -1]))
    got = jax.jit(kv_copy.copy_pages)(before, *ids)
    for one, other in zip(got, before, strict=True):
        np.testing.assert_array_equal(one[5], other[3])
        np.testing.assert_array_equal(one[3], other[5])
        np.testing.assert_array_equal(one[7:], other[7:])
    for one, other in zip(got, reference.copy_pages(before, *ids), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_pool_without_scales_keeps_its_empty_ones():
    numbers, scales = jax.jit(kv_copy.copy_pages)((pool(), jnp.zeros((0,))), jnp.array([1]), jnp.array([2]))
    assert scales.shape == (0,)
    np.testing.assert_array_equal(numbers[2], pool()[1])


def test_rows_move_as_if_all_were_read_first():
    before = with_scales("token")
    moves = [(1, 1, 1, 0), (1, 2, 1, 1), (1, 3, 2, 2), (4, 0, PAGES, 0), (4, 0, -1, 0)]
    columns = [jnp.array(column) for column in zip(*moves, strict=True)]
    got = jax.jit(kv_copy.move_rows)(before, *columns)
    for one, other, meaning in zip(got, before, reference.move_rows(before, *columns), strict=True):
        want = np.array(other)
        for page, slot, to, at in moves[:3]:
            want[to, :, :, at] = other[page, :, :, slot]
        np.testing.assert_array_equal(one, want)
        np.testing.assert_array_equal(meaning, want)


def test_staged_pages_come_back():
    before, pages = with_scales("head"), jnp.array([7, 2, PAGES])
    staged = jax.jit(kv_copy.gather_pages)(before, pages)
    np.testing.assert_array_equal(staged[0][:2], before[0][np.array([7, 2])])
    cleared = jax.tree.map(jnp.zeros_like, before)
    back = jax.jit(kv_copy.scatter_pages)(cleared, pages, staged)
    for one, other in zip(back, before, strict=True):
        np.testing.assert_array_equal(one[np.array([2, 7])], other[np.array([2, 7])])
        assert not np.asarray(one[np.array([0, 8])]).any()


def test_explains_the_path():
    ids = jnp.zeros(8, jnp.int32)
    assert kv_copy.explain(pool(), ids).path == "xla"
    assert kv_copy.explain(pool(), ids, target=Target("gpu", (8, 0))).path == "mosaic"
    assert kv_copy.explain(pool(), ids, target=Target("gpu", (10, 0))).path == "xla"
    many = kv_copy.explain(pool(), jnp.zeros(4000, jnp.int32), target=Target("gpu", (9, 0)))
    assert (many.path, "4000 copies" in many.why) == ("xla", True)
