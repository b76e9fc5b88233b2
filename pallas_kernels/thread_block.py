"""Limits of a CTA on an NVIDIA GPU, and the split of its registers between warpgroups.

A launch gives every thread of a CTA the same number of registers, from a file of 65,536 per multiprocessor. With
``setmaxnreg`` a producer, which only issues copies, returns most of its registers to the CTA's pool, and consumers take
them. A consumer that requests more than the pool has waits forever (PTX ISA, ``setmaxnreg``): no compiler and no
interpreter reports it. So kernels request what `split` computes, `compat.kernel` rejects a CTA that no GPU can launch,
and `pallas_kernels.check` compares the requests of a compiled kernel with its registers at launch.

Numbers are those of compute capability 8.0 to 9.0 (CUDA C++ Programming Guide, table of technical specifications).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPGROUP = 128  # threads
MOST_THREADS = 1024
SHARED_BYTES = 232_448  # of Hopper; Ampere and Ada have less
MOST_CLUSTER = 8  # CTAs that every Hopper GPU can launch as a cluster
MOST_NAMED_BARRIERS = 16
MOST_ARRIVALS = 2**20 - 1  # most arrivals that an mbarrier counts
REGISTERS = 65_536  # of a multiprocessor, all of which one CTA may have
REGISTER_STEP = 8  # allocation unit of a thread's registers
_MOST_REGISTERS, _LEAST_REGISTERS = 255, 24  # of a thread; fewest that ``setmaxnreg`` may leave
_ALIGNMENT, _BARRIER_BYTES = 1024, 8  # of an array in SMEM


class Split(NamedTuple):
    """Registers of a thread of each kind of warpgroup."""

    producer: int
    consumer: int


def at_launch(warpgroups: int) -> int:
    """Return the most registers per thread at launch of one CTA with ``warpgroups`` warpgroups."""
    return min(_MOST_REGISTERS, REGISTERS // (warpgroups * WARPGROUP) // REGISTER_STEP * REGISTER_STEP)


def split(consumers: int, producer: int = _LEAST_REGISTERS) -> Split:
    """Split all registers of a CTA between ``consumers`` consumers and a producer that keeps ``producer``."""
    pool = (consumers + 1) * at_launch(consumers + 1)
    return Split(producer, (pool - producer) // consumers // REGISTER_STEP * REGISTER_STEP)


class Block(NamedTuple):
    """Hardware requirements of one CTA.

    Attributes:
        threads: threads of the CTA.
        shared_bytes: bytes of its SMEM, mbarriers included.
        cluster: CTAs that are launched together.
        arrivals: largest arrival count of an mbarrier.
    """

    threads: int
    shared_bytes: int
    cluster: int = 1
    arrivals: int = 1

    def faults(self, shared_bytes: int = SHARED_BYTES) -> Iterator[str]:
        """Yield why a GPU with ``shared_bytes`` of SMEM per CTA would not launch it, in one sentence each."""
        if not 1 <= self.threads <= MOST_THREADS:
            yield f"a thread block has {self.threads} threads: at most {MOST_THREADS}"
        if self.shared_bytes > shared_bytes:
            yield f"a thread block needs {self.shared_bytes} bytes of shared memory: there are {shared_bytes}"
        if not 1 <= self.cluster <= MOST_CLUSTER:
            yield f"a cluster has {self.cluster} thread blocks: at most {MOST_CLUSTER} can be launched everywhere"
        if not 1 <= self.arrivals <= MOST_ARRIVALS:
            yield f"a barrier waits for {self.arrivals} arrivals: at most {MOST_ARRIVALS}"


def block_of(warpgroups: int, cluster: int, scratch_types: Any) -> Block:
    """Return the CTA of a kernel with these scratch types (a tree of `plgpu.SMEM`, `plgpu.RefUnion` and barriers).

    Every thread of a warpgroup arrives at a barrier, as Mosaic GPU lowers kernels in lane semantics.
    """
    leaves = jax.tree.leaves(scratch_types)
    barriers = [leaf for leaf in leaves if isinstance(leaf, plgpu.Barrier | plgpu.ClusterBarrier)]
    return Block(
        threads=warpgroups * WARPGROUP,
        shared_bytes=sum(map(_bytes_of, leaves)),
        cluster=cluster,
        arrivals=max((barrier.num_arrivals * WARPGROUP for barrier in barriers), default=1),
    )


def _bytes_of(scratch: Any) -> int:
    """Return the bytes of SMEM of a scratch type."""
    if isinstance(scratch, plgpu.RefUnion):
        return max(sum(map(_bytes_of, jax.tree.leaves(group))) for group in scratch.refs)
    if isinstance(scratch, plgpu.Barrier | plgpu.ClusterBarrier):
        return _BARRIER_BYTES * int(np.prod(scratch.num_barriers))  # JAX 0.11 has a number there, 0.12 a shape
    if scratch.memory_space != plgpu.SMEM:
        return 0
    bits = 4 if scratch.dtype in (jnp.int4, jnp.uint4) else jnp.dtype(scratch.dtype).itemsize * 8
    return -(-math.prod(scratch.shape) * bits // 8 // _ALIGNMENT) * _ALIGNMENT
