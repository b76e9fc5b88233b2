"""Pages out of the pools and back: what comes back is what went."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.kv.pool import LayerPool, copy_pages, new_pools
from jaxinfer.kv.transfer import HostPages, export_pages, import_pages, moved_pages, slot_bytes
from jaxinfer.types import CacheSpec, LayerSpec, StateSpec

# Layers 0 and 2 share a group, layer 1 has one of its own.
SPEC = CacheSpec((LayerSpec(), LayerSpec(5), LayerSpec()), kv_heads=2, head_dim=4)
PAGES, PAGE = 6, 8


def filled(dtype: str = "float32") -> list[LayerPool]:
    rng = np.random.default_rng(0)
    return [
        pool._replace(data=jnp.asarray(rng.standard_normal(pool.data.shape, np.float32)).astype(dtype))
        for pool in new_pools(SPEC, PAGES, PAGE, jnp.dtype(dtype))
    ]


def ids(*groups: list[int]) -> jax.Array:
    return jnp.array(groups, jnp.int32)


def same(one: list[LayerPool], other: list[LayerPool]) -> bool:
    return all(np.array_equal(a.data, b.data) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_come_back_to_other_places(dtype):
    pools, empty = filled(dtype), new_pools(SPEC, PAGES, PAGE, jnp.dtype(dtype))
    source, target = ids([1, 4], [2, 0]), ids([5, 3], [1, PAGES])
    host = HostPages(SPEC, 9, PAGE, jnp.dtype(dtype))
    host.put([7, 2], export_pages(SPEC, pools, source))
    back = import_pages(SPEC, empty, jnp.asarray(host.take([7, 2], 2)), target)
    for layer, (sources, targets) in enumerate([([1, 4], [5, 3]), ([2], [1]), ([1, 4], [5, 3])]):
        want = np.zeros_like(np.asarray(empty[layer].data))
        want[targets] = np.asarray(pools[layer].data)[sources]
        np.testing.assert_array_equal(back[layer].data, want)


def test_pages_on_the_host_can_be_taken_in_any_order():
    host, pages = HostPages(SPEC, 4, PAGE, jnp.dtype("float32")), np.arange(3.0)[:, None, None, None, None, None]
    array = jnp.asarray(np.broadcast_to(pages, (3, 3, 2, 2, PAGE, 4)), jnp.float32)
    host.put([3, 0, 1], array)
    host.settle([0])
    assert [float(host.take([page], 1).mean()) for page in (1, 0, 3)] == [2.0, 1.0, 0.0]
    taken = host.take([3, 1], 4)
    assert taken.shape == (4, 3, 2, 2, PAGE, 4)
    assert taken[1].mean() == 2.0
    taken[:] = -1.0
    assert host.take([1], 1).mean() == 2.0, "what was taken is a copy"


def test_the_last_export_to_a_page_counts():
    host = HostPages(SPEC, 4, PAGE, jnp.dtype("float32"))
    for value in (1.0, 2.0):
        host.put([0, 1], jnp.full((2, 3, 2, 2, PAGE, 4), value))
        host.settle([1])
    assert host.take([0], 1).mean() == host.take([1], 1).mean() == 2.0


def test_memory_is_taken_with_use():
    host = HostPages(SPEC, 1 << 40, PAGE, jnp.dtype("bfloat16"))
    assert host.nbytes == 0
    host.put([5, 1 << 30], jnp.ones((2, 3, 2, 2, PAGE, 4), jnp.bfloat16))
    host.settle([5, 1 << 30])
    assert host.nbytes == 2 * SPEC.bytes_per_page(PAGE, 2)
    assert host.take([5], 1).dtype == ml_dtypes.bfloat16


def test_pages_beyond_the_space_and_pages_that_nobody_wrote_are_refused():
    host = HostPages(SPEC, 2, PAGE, jnp.dtype("float32"))
    with pytest.raises(IndexError, match="host page 2 of 2"):
        host.put([2], jnp.ones((1, 3, 2, 2, PAGE, 4)))
    with pytest.raises(KeyError):
        host.take([0], 1)


def test_copies_go_by_group():
    pools = filled()
    source, target = ids([1, 4], [2, 0]), ids([5, PAGES], [1, 3])
    got = jax.jit(lambda pools: copy_pages(SPEC, pools, source, target))(pools)
    for layer, moves in enumerate([[(1, 5)], [(2, 1), (0, 3)], [(1, 5)]]):
        want = np.array(pools[layer].data)
        for one, other in moves:
            want[other] = pools[layer].data[one]
        np.testing.assert_array_equal(got[layer].data, want)
    assert not same(got, pools)


@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_pages_of_unlike_layers_come_back(kind: str):
    """Two heads of 4 numbers in some layers, six of 10 in another: they stand side by side in two heads on the host."""
    layers = (LayerSpec(), LayerSpec(5, kv_heads=6, head_dim=10), LayerSpec())
    spec = CacheSpec(layers, kv_heads=2, head_dim=4).stored_as(kind)
    rng, dtype = np.random.default_rng(0), jnp.dtype("float32")
    empty = new_pools(spec, PAGES, PAGE, dtype)
    pools = jax.tree.map(lambda x: jnp.asarray(rng.integers(-99, 99, x.shape), x.dtype), empty)
    source, target = ids([1, 4], [2, 0]), ids([5, 3], [1, PAGES])
    host = HostPages(spec, 9, PAGE, dtype)
    exported = export_pages(spec, pools, source)
    described = moved_pages(spec, 2, PAGE, dtype)
    assert (exported.shape, exported.dtype) == (described.shape, described.dtype)
    assert exported.shape == (2, 1, 2, 2, PAGE, (4 + 30 + 4) if kind == "auto" else (8 + 3 * 14 + 8))
    host.put([7, 2], exported)
    back = import_pages(spec, empty, jnp.asarray(host.take([7, 2], 2)), target)
    for layer, (sources, targets) in enumerate([([1, 4], [5, 3]), ([2], [1]), ([1, 4], [5, 3])]):
        for got, had in zip(jax.tree.leaves(back[layer]), jax.tree.leaves(pools[layer]), strict=True):
            want = np.zeros_like(np.asarray(had))
            want[targets] = np.asarray(had)[sources]
            np.testing.assert_array_equal(got, want)


def test_neighbouring_heads_stand_beside_each_other():
    """So a device that has some of a layer's heads has all of their numbers in its part of a page."""
    layers = (LayerSpec(kv_heads=4), LayerSpec())
    spec = CacheSpec(layers, kv_heads=2, head_dim=1)
    pools = new_pools(spec, 1, 1, jnp.dtype("float32"))
    pools[0] = pools[0]._replace(data=jnp.arange(8.0).reshape(pools[0].data.shape))
    exported = export_pages(spec, pools, ids([0]))
    assert exported[0, 0, 0, :, 0].tolist() == [[0.0, 1.0, 0.0], [2.0, 3.0, 0.0]]


def test_layers_with_states_alone_have_no_pages_to_move():
    """As in a pipeline stage without attention."""
    layers = (LayerSpec(attends=False, states=(StateSpec((4, 3)),)), LayerSpec())
    spec = CacheSpec(layers, kv_heads=2, head_dim=4, page_size=PAGE).part(slice(0, 1))
    exported = export_pages(spec, [], ids([1, 4, 2], [0, 0, 0]))
    described = moved_pages(spec, 3, PAGE, jnp.dtype("float32"))
    assert (exported.shape, exported.dtype) == (described.shape, described.dtype)
    assert slot_bytes(np.asarray(exported)).shape == (3, PAGE, 0)
    assert import_pages(spec, [], exported, ids([1, 4, 2], [0, 0, 0])) == []
