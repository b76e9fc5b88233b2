"""What benchmarks/parallel.py reads from programs, and that it starts with the devices it needs."""

import collections
import subprocess
import sys

from benchmarks.mesh.traffic import _BYTES, _RESULT

PROGRAM = """
  %all-reduce.1 = f32[16,768]{1,0} all-reduce(%dot.2), channel_id=1
  %x = (bf16[4,8]{1,0}) all-to-all-start(%y), channel_id=2
  %all-gather.3 = bf16[16,4096]{0,1} all-gather(%dot.9), dimensions={1}
  %fusion.7 = f32[16,768]{1,0} fusion(%all-reduce.1), kind=kLoop
"""


def test_collectives_are_found_with_their_shapes():
    found = collections.Counter({(kind, dtype, shape): 1 for dtype, shape, kind in _RESULT.findall(PROGRAM)})
    assert found == {
        ("all-reduce", "f32", "16,768"): 1,
        ("all-to-all", "bf16", "4,8"): 1,
        ("all-gather", "bf16", "16,4096"): 1,
    }
    assert all(dtype in _BYTES for _, dtype, _ in found)


def test_the_command_says_what_it_can(repo):
    done = subprocess.run(
        [sys.executable, "benchmarks/parallel.py", "--help"], cwd=repo, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "bubble|bytes|experts" in done.stdout
