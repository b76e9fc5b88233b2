"""Tests of the garbage collector settings of a server process, in a subprocess because they cannot be undone."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc
from jaxinfer.serve.runtime import malloc_trim as heap
kept = [[] for _ in range(1000)]
cycle = []
cycle.append(cycle)
del cycle
heap.settle()
assert gc.get_freeze_count() > 1000
assert gc.collect() == 0, "garbage was frozen"
assert gc.isenabled()
assert gc.get_threshold()[0] > 700
"""


TIDYING = """
import asyncio, gc, weakref
from jaxinfer.serve.runtime import malloc_trim as heap

class Thing:
    pass

def leave() -> weakref.ref:
    things = [Thing() for _ in range(20_000)]
    for thing in things:
        thing.me = thing
    return weakref.ref(things[0])

async def main():
    heap.settle()
    gc.disable()  # only who tidies collects
    active, garbage = 1, leave()
    tidying = asyncio.create_task(heap.tidy(lambda: active))
    await asyncio.sleep(1.0)
    assert garbage() is not None, "collected while something ran"
    active = 0
    async with asyncio.timeout(30):
        while garbage() is not None:
            await asyncio.sleep(0.05)
    tidying.cancel()

asyncio.run(main())
"""


def test_what_there_is_stays_and_garbage_goes() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_what_requests_left_goes_when_none_runs() -> None:
    done = subprocess.run([sys.executable, "-c", TIDYING], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


LARGE = """
import asyncio, gc
from jaxinfer.serve.runtime import malloc_trim as heap

async def main():
    heap.settle()
    gc.disable()
    tidying = asyncio.create_task(heap.tidy(lambda: 0))
    await asyncio.sleep(1.0)
    before = heap.resident()
    messages = [b"%d" % number * 30_000 for number in range(100, 1100)]
    last = messages[-1]  # above the others: what is below it is kept by glibc when it is free
    held = heap.resident()
    assert held > before + 70_000_000, (before, held)
    del messages
    async with asyncio.timeout(30):
        while heap.resident() > before + 30_000_000:
            await asyncio.sleep(0.05)
    tidying.cancel()

asyncio.run(main())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc alone gives memory back on demand")
def test_what_a_few_large_messages_left_goes_too() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
