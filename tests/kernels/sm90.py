"""Compile one decode kernel to H100 machine code on a machine without a GPU; ptxas' report goes to standard output.

A program of its own, because a refused target aborts the process and because the flags must stand before JAX starts:
``python -m tests.kernels.sm90 page head_dim group dtype stages``. Needs jax-cuda13-plugin and jax-cuda13-pjrt, but no
CUDA libraries.
"""

# ruff: noqa: E402
import os
import pathlib
import sys
import tempfile

DUMP = tempfile.TemporaryDirectory()
os.environ.update(
    JAX_PLATFORMS="cpu",
    JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
    MOSAIC_GPU_DUMP_PTXAS="1",
    MOSAIC_GPU_DUMP_TO=DUMP.name,
    XLA_FLAGS="--xla_gpu_autotune_level=0",
)

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from pallas_kernels.paged_attention.mosaic import Tiles, paged_decode_mosaic

ROWS, KV_HEADS, PAGES, CONTEXT = 4, 2, 64, 2048


class H100(jax.sharding.AbstractDevice):
    compute_capability = "9.0"


def compile_for_h100(function, shapes):
    """``function`` compiled for an H100, its arguments given as (shape, dtype)."""
    text = (pathlib.Path(__file__).parent / "h100.txtpb").read_text(encoding="utf-8")
    device = topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x1x1").devices[0]
    here = jax.sharding.SingleDeviceSharding(device)
    abstract = H100(device_kind=device.device_kind, num_cores=device.core_count, platform="gpu")
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=here) for shape, dtype in shapes]
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=abstract)):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()


def main(page: int, head_dim: int, group: int, dtype: str, stages: int) -> None:
    def decode(q, pool, tables, lengths):
        return paged_decode_mosaic(q, pool, tables, lengths, scale=head_dim**-0.5, tiles=Tiles(stages=stages))

    shapes = [
        ((ROWS, KV_HEADS * group, head_dim), jnp.dtype(dtype)),
        ((PAGES, 2, KV_HEADS, page, head_dim), jnp.dtype(dtype)),
        ((ROWS, CONTEXT // page), jnp.int32),
        ((ROWS,), jnp.int32),
    ]
    compile_for_h100(decode, shapes)
    for report in pathlib.Path(DUMP.name).glob("*.ptxas"):
        print(report.read_text(encoding="utf-8"))


if __name__ == "__main__":
    page, head_dim, group, dtype, stages = sys.argv[1:]
    main(int(page), int(head_dim), int(group), dtype, int(stages))
