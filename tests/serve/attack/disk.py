"""A small separate disk for a server, which tests fill or freeze."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Iterator

MIB = 48
_FILLER = "filler"


class Disk:
    """The file system of a server's log and of its socket folders.

    Attributes:
        folder: mount point.
        is_small: it is a separate file system; otherwise it can be neither filled nor frozen.
    """

    def __init__(self, folder: pathlib.Path, is_small: bool) -> None:
        self.folder, self.is_small = folder, is_small

    def fill(self) -> None:
        """Fill the disk to the last byte, so that no file with contents can be created."""
        with contextlib.suppress(OSError), (self.folder / _FILLER).open("ab", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(b"\0" * size)

    def drain(self) -> None:
        (self.folder / _FILLER).unlink(missing_ok=True)

    def freeze(self) -> None:
        """Block all writers until `thaw`."""
        _run("fsfreeze", "--freeze", str(self.folder))

    def thaw(self) -> None:
        _run("fsfreeze", "--unfreeze", str(self.folder))


@contextlib.contextmanager
def small_disk(folder: pathlib.Path) -> Iterator[Disk]:
    """Yield a disk of `MIB` MiB if this user may mount (root, Linux), else an ordinary folder."""
    image, mounted = folder / "disk.img", folder / "disk"
    mounted.mkdir()
    is_small = os.geteuid() == 0 and _mount(image, mounted)
    disk = Disk(mounted, is_small)
    try:
        yield disk
    finally:
        if is_small:
            with contextlib.suppress(subprocess.CalledProcessError):
                disk.thaw()
            _run("umount", "--lazy", str(mounted))
            image.unlink()


def _mount(image: pathlib.Path, folder: pathlib.Path) -> bool:
    try:
        with image.open("wb") as file:
            file.truncate(MIB << 20)
        _run("mkfs.ext4", "-q", "-m", "0", str(image))
        _run("mount", "-o", "loop", str(image), str(folder))
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
