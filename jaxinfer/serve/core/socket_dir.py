"""Socket folders of engine cores, and their removal after a server was killed. No jax.

Each folder is locked (flock) by the process that made it: the kernel releases the lock when the process ends, however
it ends. Process ids would not do: they are reused, and containers with a common /tmp do not share them.
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
    """A folder of mode 0700, so that no other user can access the socket. Made by `make`; `remove` must be called."""

    def __init__(self, path: pathlib.Path, lock: int) -> None:
        self.path, self._lock = path, lock

    @classmethod
    def make(cls) -> SocketFolder:
        """Create a folder.

        Raises:
            OSError: it cannot be created.
        """
        while True:
            path = pathlib.Path(tempfile.mkdtemp(prefix=PREFIX))
            try:
                lock = _lock(path, fcntl.LOCK_EX)
            except FileNotFoundError:
                continue  # another server found it before it was locked, and removed it as stale
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
    """Remove the folders of servers that were killed, and return their number.

    These belong to this user, are not locked, and hold a socket or nothing. Links are not followed.
    """
    place = pathlib.Path(tempfile.gettempdir())
    return sum(_swept(path) for path in place.glob(f"{PREFIX}*"))


def _swept(path: pathlib.Path) -> bool:
    try:
        lock = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its server lives, or it is another user's, not a folder, or gone
        return False
    try:
        return _is_left(lock) and _remove(path)
    finally:
        os.close(lock)


def _lock(path: pathlib.Path, how: int) -> int:
    """Return the descriptor that holds the lock of an existing folder.

    Raises:
        FileNotFoundError: the folder was removed before.
        OSError: another process has the lock, or there is no such folder.
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
    """Whether `SocketFolder.make` made the folder for this user."""
    found, names = os.fstat(folder), os.listdir(folder)
    private = found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == stat.S_IRWXU
    sockets = (stat.S_ISSOCK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode) for name in names)
    return private and names in ([], [_SOCKET]) and all(sockets)


def _remove(path: pathlib.Path) -> bool:
    """Remove a folder and return whether it is gone. It holds only the socket, so no other file can be lost."""
    with contextlib.suppress(OSError):
        (path / _SOCKET).unlink(missing_ok=True)
        path.rmdir()
        return True
    return not path.exists()
