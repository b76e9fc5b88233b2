"""benchmarks/parallel.py: figures read from programs, and a start with the devices it needs."""

import subprocess
import sys

from benchmarks.mesh.traffic import collective_bytes

PROGRAM = """
  %all-reduce.1 = f32[16,768]{1,0} all-reduce(%dot.2), channel_id=1
  %x = (u16[4,8]{1,0}, u16[4,8]{1,0}) all-to-all(%y, %z), channel_id=2
  %a = (bf16[4,8]{1,0}) all-to-all-start(%y), channel_id=2
  %all-gather.3 = bf16[16,4096]{0,1} all-gather(%dot.9), dimensions={1}
  %fusion.7 = f32[16,768]{1,0} fusion(%all-reduce.1), kind=kLoop
"""


def test_collectives_are_found_with_their_bytes():
    assert collective_bytes(PROGRAM) == {
        "all-reduce": 16 * 768 * 4,
        "all-to-all": 2 * 4 * 8 * 2 + 4 * 8 * 2,
        "all-gather": 16 * 4096 * 2,
    }


def test_the_command_says_what_it_can(repo):
    done = subprocess.run(
        [sys.executable, "benchmarks/parallel.py", "--help"], cwd=repo, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "bubble|bytes|experts" in done.stdout
