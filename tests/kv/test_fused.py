"""Fused QKV projections that are rotated when written: the same results as separately rotated projections."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kv import pool
from jaxinfer.kv.pool import DecodeAttend, LayerPool, PrefillAttend, fuses, new_pools
from jaxinfer.layers.attention import Attention
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.types import CacheSpec, LayerSpec
from tests.kernels.test_choice import Hopper

HEADS, KV_HEADS, DIM, PAGE, WIDTH = 6, 2, 16, 16, 24
TABLES = jnp.array([[[3, 0, 5], [1, 4, 2]]])  # of two sequences
LAYER = LayerSpec(window=20)

SPECS = {kind: CacheSpec((LAYER,), KV_HEADS, DIM).stored_as(kind) for kind in ("auto", "int8")}


def rows() -> tuple[DecodeAttend, jax.Array]:
    """Return rows of two sequences at their positions, and one idle row."""
    positions = jnp.array([17, -1, 30])
    return DecodeAttend(SPECS["auto"], TABLES[:, jnp.array([0, 0, 1])], positions), positions


def chunks() -> tuple[PrefillAttend, jax.Array]:
    """Return two chunks of eight tokens: one crosses a page boundary, one has padding."""
    starts = jnp.array([11, 3])
    attend = PrefillAttend(SPECS["auto"], TABLES, starts, jnp.array([8, 5]))
    return attend, (starts[:, None] + jnp.arange(8)).reshape(-1)


@functools.cache
def operands(count: int) -> tuple[dict[str, jax.Array], jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {"qkv": (WIDTH, KV_HEADS, HEADS // KV_HEADS + 2, DIM), "out": (HEADS * DIM, WIDTH)}
    params = {name: jnp.asarray(rng.standard_normal(shape, np.float32)) for name, shape in shapes.items()}
    return params, jnp.asarray(rng.standard_normal((count, WIDTH), np.float32))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("attends", "kind"), [(rows, "auto"), (rows, "int8"), (chunks, "auto"), (chunks, "int8")])
def test_a_projection_that_is_written_whole_gives_the_same(attends, kind, interleaved, monkeypatch):
    """Uses the XLA path of the write, which splits the projection: the test covers the call, not a kernel."""
    attend, positions = attends()
    params, x = operands(len(positions))
    cache = new_pools(SPECS[kind], 6, PAGE, jnp.dtype("float32"))[0]
    module = Attention(HEADS, KV_HEADS, DIM, LAYER, interleaved=interleaved)
    rope = RopeConfig(partial=0.5).angles(positions, DIM)

    def apply() -> tuple[jax.Array, LayerPool]:
        return jax.jit(lambda x, cache: module.apply({"params": params}, x, rope, attend, cache))(x, cache)

    want = apply()
    asked = []
    monkeypatch.setattr(pool, "fuses", lambda *_: asked.append(1) or True)
    got = apply()
    assert asked
    np.testing.assert_allclose(got[0], want[0], atol=1e-4)
    np.testing.assert_allclose(got[1].data, want[1].data, atol=1 if kind == "int8" else 1e-5)
    if kind == "int8":
        np.testing.assert_allclose(got[1].scales, want[1].scales, rtol=1e-6)
    assert np.asarray(want[1].data).any()


def test_only_a_kernel_is_given_a_projection_whole():
    cache = new_pools(SPECS["auto"], 6, PAGE, jnp.dtype("float32"))[0]
    qkv, angles = jnp.zeros((3, KV_HEADS, 5, DIM)), jnp.zeros((3, DIM // 2))
    for backend in ("auto", "mosaic", "xla"):
        assert not fuses(cache, qkv, (angles, angles), False, backend)
    device = Hopper(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        assert fuses(cache, qkv, (angles, angles), False, "auto")
        assert not fuses(cache, qkv, (angles, angles), False, "xla")
        assert not fuses(cache, qkv, (angles[:, :3], angles[:, :3]), False, "mosaic")
