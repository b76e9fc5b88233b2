"""The Mosaic copy kernel, interpreted on the CPU, is bitwise identical to the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.kv_copy import mosaic, reference

PAGES, PAGE = 9, 16


def make_pool(*, dtype=jnp.bfloat16, scales=None, kv_heads=2, head_dim=64):
    rng = np.random.default_rng(0)
    numbers = jnp.asarray(rng.integers(-100, 100, (PAGES, 2, kv_heads, PAGE, head_dim)), dtype)
    if scales is None:
        return numbers
    return numbers, jnp.asarray(rng.normal(size=numbers.shape[: 3 + (scales == "token")]), jnp.float32), jnp.zeros((0,))


def check(op, pool, ids, tiles=None):
    ids = [jnp.asarray(x, jnp.int32) for x in ids]
    call = getattr(mosaic, op)
    got = compat.interpreted(lambda: call(pool, *ids, tiles=tiles, interpret=compat.interpret_params()))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(getattr(reference, op)(pool, *ids)), strict=True):
        np.testing.assert_array_equal(one.astype(jnp.float32), other.astype(jnp.float32))


# Every page moves by one and two copies are dropped: more copies than registers can hold.
RING = ([*range(PAGES), 0, 0], [*range(1, PAGES), 0, PAGES, -1])
SWAP = ([2, 8, 7, 7], [8, 2, PAGES, 1])
# Accepted tokens of a tree, slots 4 to 12, move up by one: each must be read before it is overwritten.
ACCEPTED = ([1] * 9 + [5], [*range(4, 13), 0], [1] * 9 + [-1], [*range(3, 12), 0])
BETWEEN = ([1, 1, 2, 3], [3, 4, 5, 0], [1, 1, PAGES, 2], [4, 3, 0, PAGE])
CASES = {
    "swap, scales per token": ("copy_pages", {"dtype": jnp.int8, "scales": "token"}, SWAP, None),
    "ring": ("copy_pages", {"kv_heads": 1}, RING, mosaic.Tiles(1024)),
    "accepted, scales per token": ("move_rows", {"dtype": jnp.int8, "scales": "token", "kv_heads": 1}, ACCEPTED, None),
    "between pages": ("move_rows", {"head_dim": 80}, BETWEEN, None),
}
SLOW = {
    f"{op}-{len(ids[0])}-{head_dim}-{scales}-{jnp.dtype(dtype).name}": (
        op,
        {"dtype": dtype, "scales": scales, "head_dim": head_dim, "kv_heads": 3},
        ids,
        None,
    )
    for op, ids in (("copy_pages", SWAP), ("copy_pages", RING), ("move_rows", BETWEEN), ("move_rows", ACCEPTED))
    for dtype, scales in ((jnp.float8_e4m3fn, "head"), (jnp.int8, "token"), (jnp.float32, None), (jnp.float16, None))
    for head_dim in (64, 96, 256)
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name):
    op, options, ids, tiles = CASES[name]
    check(op, make_pool(**options), ids, tiles)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_equals_the_reference_for_every_option(name):
    op, options, ids, tiles = SLOW[name]
    check(op, make_pool(**options), ids, tiles)


def writes_at_once(monkeypatch):
    """Patch the kernel to write each copy as soon as it is read."""

    def copy_tile(own, array, copies, tile, count):
        for i in range(count):
            mosaic._write(own, array, copies, tile, i, mosaic._read(own, array, copies, tile, i, 1))

    monkeypatch.setattr(mosaic, "_copy_tile", copy_tile)


def drops_nothing(monkeypatch):
    target = mosaic._target
    monkeypatch.setattr(mosaic, "_target", lambda own, *a: (target(own, *a)[0] % own.pages, target(own, *a)[1], True))


@pytest.mark.parametrize("mutation", [writes_at_once, drops_nothing])
def test_a_mistake_is_caught(monkeypatch, mutation):
    mutation(monkeypatch)
    jax.clear_caches()
    with pytest.raises(AssertionError):
        check("copy_pages", make_pool(kv_heads=1), SWAP)
    jax.clear_caches()


def test_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="at most"):
        mosaic.copy_pages(make_pool(), jnp.zeros(4000, jnp.int32), jnp.zeros(4000, jnp.int32))
    with pytest.raises(ValueError, match="int32"):
        mosaic.copy_pages(jnp.zeros((4, 8), jnp.int32), jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="power of two"):
        mosaic.Tiles(1000)
