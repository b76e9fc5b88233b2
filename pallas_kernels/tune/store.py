"""Writer of results to ``tiles.json``: immediate and atomic."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence

from pallas_kernels import tiles
from pallas_kernels.tiles import Entry, Option


@dataclasses.dataclass
class Files:
    """The result files, as they are on disk.

    Attributes:
        out: one file for all kernels; None: one file per op.
    """

    out: pathlib.Path | None = None
    package: pathlib.Path = tiles.PACKAGE
    _content: dict[pathlib.Path, tuple[Entry, ...]] = dataclasses.field(default_factory=dict)

    def path(self, kernel: str) -> pathlib.Path:
        return self.out or tiles.tiles_file(kernel, self.package)

    def entries(self, kernel: str) -> tuple[Entry, ...]:
        """Read all entries of a kernel's file. Raises ValueError for a broken file, and names it."""
        path = self.path(kernel)
        if path not in self._content:
            self._content[path] = tiles.read(path)
        return self._content[path]

    def bits(self, device: str, kernel: str, options: Mapping[str, Option]) -> Mapping[str, int]:
        """Return the bits that are already fixed for these options; empty if none are."""
        known = _found(self.entries(kernel), device, kernel, options)
        return {} if known is None else known.bits

    def add(self, entry: Entry) -> None:
        self._write(entry.kernel, added(self.entries(entry.kernel), entry))

    def forget(self, device: str, kernel: str) -> None:
        """Remove the entries of a kernel on such devices."""
        kept = tuple(one for one in self.entries(kernel) if (one.device, one.kernel) != (device, kernel))
        self._write(kernel, kept)

    def _write(self, kernel: str, entries: tuple[Entry, ...]) -> None:
        """Replace the file atomically: concurrent readers see the old file or the new one."""
        path = self.path(kernel)
        part = path.with_name(f"{path.name}.part")
        part.write_text(tiles.as_text(entries), encoding="utf-8")
        os.replace(part, path)
        self._content[path] = entries


def added(entries: Sequence[Entry], new: Entry) -> tuple[Entry, ...]:
    """Add ``new``, which replaces entries of equal sizes. Its bits must equal those of the entry it joins.

    Raises:
        ValueError: they differ: sizes that were measured with different bits do not belong together.
    """
    old = _found(entries, new.device, new.kernel, new.options)
    if old is None:
        return (*entries, new)
    if old.bits != new.bits:
        raise ValueError(f"{new.kernel}: its entry has {dict(old.bits)}, the new sizes have {dict(new.bits)}")
    sizes = [one.sizes for one in new.measured]
    kept = tuple(one for one in old.measured if one.sizes not in sizes)
    others = tuple(one for one in entries if one is not old)
    return (*others, dataclasses.replace(old, measured=(*kept, *new.measured)))


def _found(entries: Sequence[Entry], device: str, kernel: str, options: Mapping[str, Option]) -> Entry | None:
    wanted = (device, kernel, options)
    return next((one for one in entries if (one.device, one.kernel, one.options) == wanted), None)
