"""`python -m tests.parallel.process_arrays ADDRESS NUMBER`: one of two processes, each with two devices."""

import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.config import EngineConfigError
from jaxinfer.engine.compilations import count_compilations
from jaxinfer.parallel.mesh import make_mesh, page_sharding, replicated
from jaxinfer.parallel.processes import (
    from_own_part,
    join_processes,
    own_devices,
    own_part,
    own_shape,
    put_whole,
    require_processes,
)
from jaxinfer.types import CacheSpec, LayerSpec


def check_pages(spec: CacheSpec, shape: tuple[int, ...], mine: slice) -> None:
    """Of four heads two are here; latents are everywhere."""
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    sharding = page_sharding(make_mesh(4), spec)
    pages = put_whole(whole, sharding)
    want = whole if spec.latent else whole[:, :, :, mine]
    np.testing.assert_array_equal(own_part(pages), want)
    assert own_shape(sharding, shape) == want.shape
    back = from_own_part(want, sharding, shape)
    assert back.sharding == sharding
    for shard in back.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])


def check_refusals() -> None:
    require_processes(make_mesh(4))
    require_processes(make_mesh(2, expert=2))
    for mesh, words in (
        (make_mesh(2, stage=2), "pipeline_parallel_size = 2 and num_processes = 2 exclude each other"),
        (make_mesh(2, data=2), "data_parallel_size = 2 and num_processes = 2 exclude each other"),
        (make_mesh(lane=4), "enable_dp_attention = True and num_processes = 2 exclude each other"),
        (make_mesh(2), "tensor_parallel_size = 2 must be all devices of the group: 2 processes x 2 = 4"),
    ):
        with pytest.raises(EngineConfigError, match=words):
            require_processes(mesh)


def main() -> None:
    number = int(sys.argv[2])
    join_processes(sys.argv[1], 2, number)
    mesh = make_mesh(4)
    assert own_devices(mesh) == jax.local_devices()
    with count_compilations() as compiled:
        everywhere = put_whole({"a": np.arange(5), "b": np.float32(2)}, replicated(mesh))
        check_pages(
            CacheSpec((LayerSpec(),) * 2, kv_heads=4, head_dim=3), (2, 2, 2, 4, 8, 3), slice(2 * number, 2 * number + 2)
        )
        latents = CacheSpec((LayerSpec(latent_rank=6),) * 2, kv_heads=1, head_dim=8)
        check_pages(latents, (2, 2, 8, 8), slice(None))
    assert compiled.count == 0
    np.testing.assert_array_equal(own_part(everywhere["a"]), np.arange(5))
    assert everywhere["b"].shape == ()
    split = NamedSharding(mesh, PartitionSpec(("expert", "tensor")))
    np.testing.assert_array_equal(own_part(put_whole(np.arange(8), split)), np.arange(4 * number, 4 * number + 4))
    check_refusals()
    print("all is well")


if __name__ == "__main__":
    main()
