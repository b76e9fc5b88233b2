"""The collector of a process that serves, in a process of its own: what it does cannot be undone."""

import subprocess
import sys

PROGRAM = """
import gc
from jaxinfer.serve import heap
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


def test_what_there_is_stays_and_garbage_goes() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
