"""Print the slowest tests, by file and by test, from the reports of `tools/test.sh`.

python -m tools.durations                      every stage in build/durations
python -m tools.durations host --most 40       one of them
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import sys
from xml.etree import ElementTree

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "build" / "durations"


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", help="names of stages (default: all that were run)")
    parser.add_argument("--most", type=int, default=20, help="lines of each list (default 20)")
    options = parser.parse_args(arguments)
    for stage in options.stages or sorted(path.stem for path in FOLDER.glob("*.xml")):
        print(report(stage, seconds_of(FOLDER / f"{stage}.xml"), options.most))
    return 0


def seconds_of(path: pathlib.Path) -> dict[tuple[str, str], float]:
    """Return the seconds by module and test of a file in JUnit's format, set-up included."""
    found = collections.defaultdict[tuple[str, str], float](float)
    for case in ElementTree.parse(path).iter("testcase"):
        found[case.get("classname", ""), case.get("name", "")] += float(case.get("time", 0))
    return found


def report(stage: str, seconds: dict[tuple[str, str], float], most: int) -> str:
    """Report the slowest files and tests of a stage."""
    files = collections.defaultdict[str, float](float)
    for (module, _), each in seconds.items():
        files[module] += each
    tests = {f"{module}::{name}": each for (module, name), each in seconds.items()}
    title = f"{stage}: {len(seconds)} tests, {sum(files.values()):.0f} s of one process"
    return "\n\n".join([title, _lines(files, most), _lines(tests, most)]) + "\n"


def _lines(seconds: dict[str, float], most: int) -> str:
    longest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:most]
    return "\n".join(f"{seconds[name]:8.1f} s  {name}" for name in longest)


if __name__ == "__main__":
    sys.exit(main())
