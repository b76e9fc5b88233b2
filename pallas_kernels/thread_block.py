"""Limits of a thread block on an NVIDIA GPU, and how the warpgroups of one share its registers.

A launch gives every thread of a block the same number of registers, of a file of 65,536 a multiprocessor. With
``setmaxnreg`` a producer, which only issues copies, returns most of its own to the block's pool, and consumers take
them. A consumer that asks for more than the pool has waits for ever (PTX ISA, ``setmaxnreg``): no compiler and no
interpreter says so. So kernels ask for what `split` gives, `compat.kernel` refuses a block that no GPU can launch, and
`pallas_kernels.check` compares what a compiled kernel asks for with what it was launched with.

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
SHARED_BYTES = 232_448  # of Hopper; others have less
MOST_CLUSTER = 8  # blocks, that every Hopper GPU can launch
MOST_NAMED_BARRIERS = 16
MOST_ARRIVALS = 2**20 - 1  # that a barrier in shared memory counts
REGISTERS = 65_536  # of a multiprocessor, all of which one block may have
REGISTER_STEP = 8  # in which those of a thread are counted
_MOST_REGISTERS, _LEAST_REGISTERS = 255, 24  # of a thread; that ``setmaxnreg`` may leave it
_ALIGNMENT, _BARRIER_BYTES = 1024, 8  # of an array in shared memory


class Split(NamedTuple):
    """Registers of a thread of each kind of warpgroup."""

    producer: int
    consumer: int


def at_launch(warpgroups: int) -> int:
    """The most registers of a thread with which one block of so many warpgroups can be launched."""
    return min(_MOST_REGISTERS, REGISTERS // (warpgroups * WARPGROUP) // REGISTER_STEP * REGISTER_STEP)


def split(consumers: int, producer: int = _LEAST_REGISTERS) -> Split:
    """What each of so many consumers may ask for where one producer keeps ``producer``: all that the block has."""
    pool = (consumers + 1) * at_launch(consumers + 1)
    return Split(producer, (pool - producer) // consumers // REGISTER_STEP * REGISTER_STEP)


class Block(NamedTuple):
    """What one thread block asks of the hardware.

    Attributes:
        threads: of the block.
        shared_bytes: of its shared memory, barriers included.
        cluster: blocks that are launched together.
        arrivals: the most that one barrier in shared memory waits for.
    """

    threads: int
    shared_bytes: int
    cluster: int = 1
    arrivals: int = 1

    def faults(self, shared_bytes: int = SHARED_BYTES) -> Iterator[str]:
        """Why a GPU with so many bytes of shared memory a block would not launch it, in one sentence each."""
        if not 1 <= self.threads <= MOST_THREADS:
            yield f"a thread block has {self.threads} threads: at most {MOST_THREADS}"
        if self.shared_bytes > shared_bytes:
            yield f"a thread block needs {self.shared_bytes} bytes of shared memory: there are {shared_bytes}"
        if not 1 <= self.cluster <= MOST_CLUSTER:
            yield f"a cluster has {self.cluster} thread blocks: at most {MOST_CLUSTER} can be launched everywhere"
        if not 1 <= self.arrivals <= MOST_ARRIVALS:
            yield f"a barrier waits for {self.arrivals} arrivals: at most {MOST_ARRIVALS}"


def block_of(warpgroups: int, cluster: int, scratch_types: Any) -> Block:
    """The block of a kernel with these scratch types (a tree of `plgpu.SMEM`, `plgpu.RefUnion` and barriers).

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
    """Bytes of shared memory that a scratch type takes."""
    if isinstance(scratch, plgpu.RefUnion):
        return max(sum(map(_bytes_of, jax.tree.leaves(group))) for group in scratch.refs)
    if isinstance(scratch, plgpu.Barrier | plgpu.ClusterBarrier):
        return _BARRIER_BYTES * int(np.prod(scratch.num_barriers))  # JAX 0.11 has a number there, 0.12 a shape
    if scratch.memory_space != plgpu.SMEM:
        return 0
    bits = 4 if scratch.dtype in (jnp.int4, jnp.uint4) else jnp.dtype(scratch.dtype).itemsize * 8
    return -(-math.prod(scratch.shape) * bits // 8 // _ALIGNMENT) * _ALIGNMENT
