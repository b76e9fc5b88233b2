"""Run jaxinfer as a container of the chart runs it: another user, no capabilities, a file system that is read-only but
for one folder. `python -m tests.fleet.contained FOLDER ARGUMENTS`; it needs the right to make namespaces.

The user has another number inside alone: to the kernel its files are those of whoever started it.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys

_USER = 10001
_INSIDE = f"""
mount --bind "$1" "$1" && mount -o remount,bind,ro / && shift &&
    exec unshare --user --map-user={_USER} --map-group={_USER} setpriv --no-new-privs "$@"
"""


def command(folder: str, *arguments: str) -> list[str]:
    """That runs ``arguments`` in there; it becomes them, with the number of its process."""
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", _INSIDE, "sh", folder, *arguments]


@functools.cache
def is_allowed(folder: str) -> bool:
    """Whether this process may do that."""
    try:
        return subprocess.run(command(folder, "true"), capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    found = command(sys.argv[1], sys.executable, *sys.argv[2:])
    os.execvp(found[0], found)
