"""Folders with a core's socket, and the removal of those whose server was killed. No jax.

Each folder is locked (flock) by the process that made it for as long as that lives: the kernel takes the lock away
with the process, however it ends. Numbers of processes could not tell that: they are used again, and containers with
a common /tmp do not share them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import stat
import tempfile

PREFIX = "jaxinfer-core-"
_SOCKET = "core"


class SocketFolder:
    """A folder of mode 0700, so that nobody else gets to the socket. Made by `make`; `remove` must be called."""

    def __init__(self, path: pathlib.Path, lock: int) -> None:
        self.path, self._lock = path, lock

    @classmethod
    def make(cls) -> SocketFolder:
        """A new one.

        Raises:
            OSError: it cannot be made.
        """
        while True:
            path = pathlib.Path(tempfile.mkdtemp(prefix=PREFIX))
            try:
                lock = _lock(path, fcntl.LOCK_EX)
            except FileNotFoundError:
                continue  # another server found it before it was locked, and took it for one that is left
            except OSError:
                _remove(path)
                raise
            return cls(path, lock)

    @property
    def socket(self) -> str:
        return str(self.path / _SOCKET)

    def remove(self) -> None:
        _remove(self.path)
        os.close(self._lock)


def sweep() -> int:
    """Remove the folders of servers that were killed; how many those were.

    They are this user's own, nobody has locked them, and they hold a socket or nothing. Links are not followed.
    """
    place = pathlib.Path(tempfile.gettempdir())
    return sum(_swept(path) for path in place.glob(f"{PREFIX}*"))


def _swept(path: pathlib.Path) -> bool:
    try:
        lock = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its server lives, or it is somebody else's, no folder, or gone
        return False
    try:
        return _is_left(lock) and _remove(path)
    finally:
        os.close(lock)


def _lock(path: pathlib.Path, how: int) -> int:
    """The descriptor that holds the lock of a folder that is there.

    Raises:
        FileNotFoundError: it was removed before.
        OSError: another process has it, or there is no such folder.
    """
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, how)
        if os.path.samestat(os.fstat(lock), os.stat(path, follow_symlinks=False)):
            return lock
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    except OSError:
        os.close(lock)
        raise


def _is_left(folder: int) -> bool:
    """Whether the folder is one that `SocketFolder.make` made, for this user."""
    found, names = os.fstat(folder), os.listdir(folder)
    private = found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == stat.S_IRWXU
    sockets = (stat.S_ISSOCK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode) for name in names)
    return private and names in ([], [_SOCKET]) and all(sockets)


def _remove(path: pathlib.Path) -> bool:
    """Remove a folder; whether it is gone. It holds nothing but the socket, so nothing else can be lost."""
    with contextlib.suppress(OSError):
        (path / _SOCKET).unlink(missing_ok=True)
        path.rmdir()
        return True
    return not path.exists()
