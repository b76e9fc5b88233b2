"""Registers of a Hopper thread block: what its launch gives each thread, and what its warpgroups may ask for then.

A launch gives every thread of a block the same number, of a file of 65,536 a multiprocessor. With ``setmaxnreg`` a
producer, which only issues copies, returns most of its own to the block's pool, and consumers take them. A consumer
that asks for more than the pool has waits for ever (PTX ISA, ``setmaxnreg``): no compiler and no interpreter says so,
and `pallas_kernels.check` compares what a kernel asks for with what it was launched with.
"""

from __future__ import annotations

from typing import NamedTuple

WARPGROUP = 128  # threads
FILE = 65_536  # registers of a multiprocessor, all of which one block may have
STEP = 8  # in which registers of a thread are counted
MOST = 255  # that a thread may have
LEAST = 24  # that ``setmaxnreg`` may leave a thread


class Split(NamedTuple):
    """Registers of a thread of each kind of warpgroup."""

    producer: int
    consumer: int


def at_launch(warpgroups: int) -> int:
    """The most registers of a thread with which one block of so many warpgroups can be launched."""
    return min(MOST, FILE // (warpgroups * WARPGROUP) // STEP * STEP)


def split(consumers: int, producer: int = LEAST) -> Split:
    """What each of so many consumers may ask for where one warpgroup keeps ``producer``: all that the block has.

    >>> split(2), split(4)
    (Split(producer=24, consumer=240), Split(producer=24, consumer=112))
    """
    pool = (consumers + 1) * at_launch(consumers + 1)
    return Split(producer, (pool - producer) // consumers // STEP * STEP)
