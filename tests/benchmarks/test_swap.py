"""benchmarks/swap.py: its table by hand, and a round with this tree on both sides."""

import pathlib
import subprocess
import sys

import pytest

from benchmarks import swap


def test_a_table_has_medians_and_the_least():
    found = {
        pathlib.Path("/x/before"): [{"seconds": value, "tokens": [[1]]} for value in (3.0, 1.0, 2.5)],
        pathlib.Path("/x/after"): [{"seconds": value, "tokens": [[1]]} for value in (0.5, 9.0, 2.0)],
    }
    head, _, line = swap._table(found).splitlines()
    assert head == "| | before: median (least) | after: median (least) |"
    assert line == "| seconds | 2.5 (1) | 2 (0.5) |"


@pytest.mark.slow
def test_the_command(repo: pathlib.Path) -> None:
    command = [sys.executable, "benchmarks/swap.py", "--rounds", "1", "--other", str(repo)]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    rows = dict(line.strip("| ").split(" | ")[:2] for line in done.stdout.splitlines()[2:])
    assert float(rows["sequences swapped"].split()[0]) > 0
    assert float(rows["ms a page, out and in"].split()[0]) > 0
