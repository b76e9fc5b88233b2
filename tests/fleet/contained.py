"""Run jaxinfer like a container of the chart: another user, no capabilities, a file system that is read-only except for
one folder. `python -m tests.fleet.contained FOLDER ARGUMENTS`; it needs permission to create namespaces.

The user id is mapped only inside the namespace: for the kernel, files belong to the caller.
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
    """Return the command that runs ``arguments`` in the container, in the same process."""
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", _INSIDE, "sh", folder, *arguments]


@functools.cache
def is_allowed(folder: str) -> bool:
    """Return whether this process may create namespaces."""
    try:
        return subprocess.run(command(folder, "true"), capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    found = command(sys.argv[1], sys.executable, *sys.argv[2:])
    os.execvp(found[0], found)
