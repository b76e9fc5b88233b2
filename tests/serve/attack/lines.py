"""A server that counts its executed source lines: `python -m tests.serve.attack.lines FILE SETTINGS OPTIONS`.

The count is eight bytes of a file that the fuzzer also maps. Each line costs one callback in total (PEP 669).
"""

from __future__ import annotations

import mmap
import pathlib
import struct
import sys
from types import CodeType

from tests.serve import processes

_FORMAT = struct.Struct("<Q")


class Lines:
    """The line count, shared by both processes. The file is created if missing."""

    def __init__(self, file: pathlib.Path) -> None:
        if not file.exists():
            file.write_bytes(bytes(_FORMAT.size))
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), _FORMAT.size)

    @property
    def count(self) -> int:
        return int(_FORMAT.unpack_from(self._map)[0])

    @count.setter
    def count(self, count: int) -> None:
        _FORMAT.pack_into(self._map, 0, count)


def watch(lines: Lines, package: str) -> None:
    """Count lines of files whose path contains ``package``."""
    watching = sys.monitoring

    def line(code: CodeType, number: int) -> object:
        if package in code.co_filename:
            lines.count += 1
        return watching.DISABLE

    watching.use_tool_id(watching.COVERAGE_ID, "attack")
    watching.register_callback(watching.COVERAGE_ID, watching.events.LINE, line)
    watching.set_events(watching.COVERAGE_ID, watching.events.LINE)


if __name__ == "__main__":
    watch(Lines(pathlib.Path(sys.argv.pop(1))), "/jaxinfer/")
    sys.exit(processes.main())
