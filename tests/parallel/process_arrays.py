"""`python -m tests.parallel.process_arrays ADDRESS NUMBER`: one of two processes, each with two devices."""

import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.compilations import count_compilations
from jaxinfer.config import EngineConfigError
from jaxinfer.parallel.arrays import in_memory, put
from jaxinfer.parallel.links import Link
from jaxinfer.parallel.mesh import make_mesh, page_sharding, replicated, stages
from jaxinfer.parallel.processes import (
    has_all,
    join_processes,
    on_host,
    own_devices,
    own_part,
    own_shards,
    processes_of,
    put_whole,
    require_processes,
)
from jaxinfer.types import CacheSpec, LayerSpec


def check_pages(spec: CacheSpec, shape: tuple[int, ...], mine: slice) -> None:
    """Check that this process has its two of four heads; latents are replicated."""
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    sharding = page_sharding(make_mesh(4), spec)
    pages = put_whole(whole, sharding)
    want = whole if spec.latent else whole[:, :, :, mine]
    np.testing.assert_array_equal(own_part(pages), want)
    outside = jax.jit(lambda x: x, out_shardings=on_host(sharding))(pages)
    assert outside.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(own_part(outside), want)
    back = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device), out_shardings=sharding)(outside)
    for shard in back.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])


def check_shards(whole: jax.Array, split: jax.Array, number: int) -> None:
    """Check the shards of an array that each process has whole, and of one that it has half of: they move alone."""
    parts = [np.arange(4 * number + 2 * place, 4 * number + 2 * place + 2) for place in (0, 1)]
    assert has_all(whole)
    assert not has_all(split)
    with count_compilations() as compiled:
        outside = in_memory(split, "pinned_host")
        again = in_memory(outside)
    assert compiled.count == 0
    assert outside.sharding.memory_kind == "pinned_host"
    assert again.sharding.memory_kind == jax.local_devices()[0].default_memory().kind
    for array in (split, outside, again, put(np.arange(8), split.sharding)):
        np.testing.assert_array_equal(own_shards(array), parts)
    np.testing.assert_array_equal(own_shards(whole), [np.arange(5)])


def check_link() -> None:
    """Check with one stage per process that activations of the first stage arrive at the last."""
    mesh = make_mesh(2, stage=2)
    first, last = stages(mesh)
    assert processes_of(last) == [0], "process 0 has the last stage"
    assert processes_of(first) == [1]
    link = Link(first, last, 3, np.dtype(np.float32), (2, 5))
    assert link.crosses
    for count in (2, 5, 2):
        x = np.arange(3 * count, dtype=np.float32).reshape(count, 3) / 7
        here = own_devices(first)
        arrived = link.carry(count, put_whole(x, replicated(first)) if here else None)
        assert (arrived is None) == bool(here)
        if arrived is not None:
            assert arrived.sharding == replicated(last)
            np.testing.assert_array_equal(np.asarray(arrived), x)
    within = stages(make_mesh(stage=4))[2:]  # in process 0
    alone = Link(*within, 3, np.dtype(np.float32), (1,))
    assert not alone.crosses
    x = put_whole(np.ones((1, 3), np.float32), replicated(within[0])) if own_devices(within[0]) else None
    arrived = alone.carry(1, x)
    assert (arrived is None) == (x is None)
    assert arrived is None or arrived.devices() == set(within[1].devices.flat)


def check_refusals() -> None:
    for mesh in (make_mesh(4), make_mesh(2, expert=2), make_mesh(2, stage=2), make_mesh(stage=4), make_mesh(2, data=2)):
        require_processes(mesh)
    for mesh, words in (
        (make_mesh(dp_attn=4), "enable_dp_attention = True and num_processes = 2 exclude each other"),
        (make_mesh(2), "tensor_parallel_size = 2 must be all devices of the group: 2 processes x 2 = 4"),
    ):
        with pytest.raises(EngineConfigError, match=words):
            require_processes(mesh)
    with pytest.raises(EngineConfigError, match="JAX has 2 processes here"):
        require_processes(make_mesh(4), grouped=False)


def main() -> None:
    number = int(sys.argv[2])
    join_processes(sys.argv[1], 2, number)
    mesh = make_mesh(4)
    assert own_devices(mesh) == jax.local_devices()
    with count_compilations() as compiled:
        everywhere = put_whole({"a": np.arange(5), "b": np.float32(2)}, replicated(mesh))
    assert compiled.count == 0
    heads = CacheSpec((LayerSpec(),) * 2, kv_heads=4, head_dim=3)
    check_pages(heads, (2, 2, 2, 4, 8, 3), slice(2 * number, 2 * number + 2))
    latents = CacheSpec((LayerSpec(latent_rank=6),) * 2, kv_heads=1, head_dim=8)
    check_pages(latents, (2, 2, 8, 8), slice(None))
    np.testing.assert_array_equal(own_part(everywhere["a"]), np.arange(5))
    assert everywhere["b"].shape == ()
    split = NamedSharding(mesh, PartitionSpec(("expert", "tensor")))
    np.testing.assert_array_equal(own_part(put_whole(np.arange(8), split)), np.arange(4 * number, 4 * number + 4))
    check_shards(everywhere["a"], put_whole(np.arange(8), split), number)
    check_refusals()
    check_link()
    print("all is well")


if __name__ == "__main__":
    main()
