"""Page export and import: pages come back with the same contents."""

import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.kv.pool import LayerPool, copy_pages, new_pools
from jaxinfer.kv.transfer import (
    TRANSFERS,
    HostPages,
    export_pages,
    import_pages,
    moved_pages,
    slot_bytes,
    transfers,
)
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.parallel.processes import on_host
from jaxinfer.types import CacheSpec, LayerSpec, StateSpec

# Layers 0 and 2 share a group, layer 1 has its own.
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
    host = HostPages(9)
    host.put([7, 2], export_pages(SPEC, pools, source))
    back = import_pages(SPEC, empty, host.take([7, 2]), target)
    for layer, (sources, targets) in enumerate([([1, 4], [5, 3]), ([2], [1]), ([1, 4], [5, 3])]):
        want = np.zeros_like(np.asarray(empty[layer].data))
        want[targets] = np.asarray(pools[layer].data)[sources]
        np.testing.assert_array_equal(back[layer].data, want)


def pages_of(*values: float) -> list[jax.Array]:
    return [jnp.full((1, 3, 2, 2, PAGE, 4), value) for value in values]


def test_pages_on_the_host_can_be_taken_in_any_order():
    host = HostPages(4)
    host.put([3, 0, 1], pages_of(0, 1, 2))
    assert [float(page.mean()) for page in host.take([1, 0, 3, 0])] == [2.0, 1.0, 0.0, 1.0]


def test_the_last_export_to_a_page_counts():
    host = HostPages(4)
    host.put([0, 1], pages_of(1, 2))
    host.put([1, 3, 3], pages_of(3, 4, 5))
    assert [float(page.mean()) for page in host.take([0, 1, 3])] == [1.0, 3.0, 5.0]


def test_pages_beyond_the_space_and_pages_that_nobody_wrote_are_refused():
    host = HostPages(2)
    for pages in ([2], [-1]):
        with pytest.raises(IndexError, match=f"host page {pages[0]} of 2"):
            host.put(pages, pages_of(1))
    with pytest.raises(KeyError):
        host.take([0])
    host.put([0], pages_of(1))
    host.release([0])
    with pytest.raises(KeyError):
        host.take([0])


OPERATIONS = st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 6), max_size=5)), max_size=12)


@given(OPERATIONS)
def test_what_was_replaced_or_released_is_held_by_nobody(operations):
    """Host memory is bounded by the number of pages: replaced and released arrays are freed."""

    host, expected, alive = HostPages(7), dict[int, int](), weakref.WeakValueDictionary[int, jax.Array]()
    for number, (puts, pages) in enumerate(operations):
        if puts:
            arrays = [jnp.zeros((1, 1, 2)) for _ in pages]
            keys = [number * 10 + place for place in range(len(pages))]
            alive.update(zip(keys, arrays, strict=True))
            host.put(pages, arrays)
            arrays.clear()
            expected.update(zip(pages, keys, strict=True))
        else:
            host.release(pages)
            for page in pages:
                expected.pop(page, None)
        assert set(alive) == set(expected.values())
        assert all(host.take([page])[0] is alive[key] for page, key in expected.items())


@given(st.integers(0, 40))
def test_moves_are_cut_into_calls(count):
    cut = list(transfers(range(count)))
    assert [move for some in cut for move in some] == list(range(count))
    sizes = [len(some) for some in cut]
    assert set(sizes) <= set(TRANSFERS)
    assert len(sizes) == sum(divmod(count, TRANSFERS[0])), "as few as there can be"


MOVES = st.lists(
    st.tuples(st.booleans(), st.lists(st.tuples(st.integers(0, 3), st.integers(0, PAGES - 1)), max_size=6)), max_size=8
)


@pytest.fixture(scope="module")
def programs() -> dict[Any, Any]:
    """Compile transfers of pages in host memory, keyed by name and page count."""
    made: dict[Any, Any] = {}
    place = NamedSharding(make_mesh(), PartitionSpec())
    pools = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), filled())
    page = moved_pages(SPEC, 1, PAGE, jnp.dtype("float32")).update(sharding=on_host(place))
    for size in TRANSFERS:
        at = jax.ShapeDtypeStruct((2, size), jnp.int32, sharding=place)
        out = jax.jit(lambda pools, source: export_pages(SPEC, pools, source), out_shardings=page.sharding)
        back = jax.jit(lambda pools, pages, target: import_pages(SPEC, pools, pages, target), donate_argnums=0)
        made["export", size] = out.lower(pools, at).compile()
        made["restore", size] = back.lower(pools, (page,) * size, at).compile()
    return made


@given(MOVES)
def test_a_page_that_comes_back_has_the_bytes_of_the_last_export_before(programs, moves):
    """An imported page has the bytes of its last export, whatever the pools hold meanwhile; no call is awaited."""
    pools = jax.device_put(filled(), NamedSharding(make_mesh(), PartitionSpec()))
    device, host, outside = [np.array(pool.data) for pool in pools], HostPages(4), dict[int, list[np.ndarray]]()
    for leaves, pairs in moves:
        known = [(page, own) for page, own in pairs if leaves or page in outside]
        if not leaves:  # no two imports to one page
            known = [*{own: (page, own) for page, own in known}.values()]
        for some in transfers(known):
            hosts, at = [page for page, _ in some], np.array([[own for _, own in some]] * 2, np.int32)
            if leaves:
                host.release(hosts)
                host.put(hosts, programs["export", len(some)](pools, at))
                outside |= {page: [layer[own].copy() for layer in device] for page, own in some}
            else:
                pools = programs["restore", len(some)](pools, host.take(hosts), at)
                for page, own in some:
                    for layer, kept in zip(device, outside[page], strict=True):
                        layer[own] = kept
    for pool, want in zip(pools, device, strict=True):
        np.testing.assert_array_equal(pool.data, want)
    for page in host.take(list(outside)):
        assert page.sharding.memory_kind == "pinned_host"


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
    """Layers have two heads of 4 numbers or six of 10: the host page packs both into two heads."""
    layers = (LayerSpec(), LayerSpec(5, kv_heads=6, head_dim=10), LayerSpec())
    spec = CacheSpec(layers, kv_heads=2, head_dim=4).stored_as(kind)
    rng, dtype = np.random.default_rng(0), jnp.dtype("float32")
    empty = new_pools(spec, PAGES, PAGE, dtype)
    pools = jax.tree.map(lambda x: jnp.asarray(rng.integers(-99, 99, x.shape), x.dtype), empty)
    source, target = ids([1, 4], [2, 0]), ids([5, 3], [1, PAGES])
    host = HostPages(9)
    exported = export_pages(spec, pools, source)
    described = moved_pages(spec, 1, PAGE, dtype)
    for page in exported:
        assert (page.shape, page.dtype) == (described.shape, described.dtype)
        assert page.shape == (1, 1, 2, 2, PAGE, (4 + 30 + 4) if kind == "auto" else (8 + 3 * 14 + 8))
    host.put([7, 2], exported)
    back = import_pages(spec, empty, host.take([7, 2]), target)
    for layer, (sources, targets) in enumerate([([1, 4], [5, 3]), ([2], [1]), ([1, 4], [5, 3])]):
        for got, had in zip(jax.tree.leaves(back[layer]), jax.tree.leaves(pools[layer]), strict=True):
            want = np.zeros_like(np.asarray(had))
            want[targets] = np.asarray(had)[sources]
            np.testing.assert_array_equal(got, want)


def test_neighbouring_heads_stand_beside_each_other():
    """A device that has some heads of a layer has all their numbers in its shard of a page."""
    layers = (LayerSpec(kv_heads=4), LayerSpec())
    spec = CacheSpec(layers, kv_heads=2, head_dim=1)
    pools = new_pools(spec, 1, 1, jnp.dtype("float32"))
    pools[0] = pools[0]._replace(data=jnp.arange(8.0).reshape(pools[0].data.shape))
    (exported,) = export_pages(spec, pools, ids([0]))
    assert exported[0, 0, 0, :, 0].tolist() == [[0.0, 1.0, 0.0], [2.0, 3.0, 0.0]]


def test_layers_with_states_alone_have_no_pages_to_move():
    """This occurs in a pipeline stage without attention."""
    layers = (LayerSpec(attends=False, states=(StateSpec((4, 3)),)), LayerSpec())
    spec = CacheSpec(layers, kv_heads=2, head_dim=4, page_size=PAGE).part(slice(0, 1))
    exported = export_pages(spec, [], ids([1, 4, 2], [0, 0, 0]))
    described = moved_pages(spec, 1, PAGE, jnp.dtype("float32"))
    assert {(page.shape, page.dtype) for page in exported} == {(described.shape, described.dtype)}
    assert slot_bytes(np.concatenate(exported)).shape == (3, PAGE, 0)
    assert import_pages(spec, [], exported, ids([1, 4, 2], [0, 0, 0])) == []
