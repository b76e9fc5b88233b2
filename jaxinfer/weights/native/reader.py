"""Reader of converted folders: each slice of an array is read directly into the buffer that a device takes."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxinfer.parallel.heads import parts_of_copies
from jaxinfer.types import ParamSpec, ParamTree, map_specs, walk_specs
from jaxinfer.weights.buffers import all_finite, new_buffer
from jaxinfer.weights.errors import CheckpointError, listed, quoted
from jaxinfer.weights.native.manifest import (
    DTYPES,
    FLOATS,
    NIBBLES,
    Manifest,
    StoredArray,
    array_folder,
    array_name,
    checksum,
    chunk_file,
)
from jaxinfer.weights.tree import Index, Path, Place, dtype_of, shape_at, whole_index

# Parameters restored at a time, each of which holds a buffer; and chunks read at a time, over all parameters.
_AT_ONCE = 2
_MOST_CHUNKS = 8


@dataclasses.dataclass(frozen=True)
class ConvertedCheckpoint:
    """The arrays of a converted folder; `load_params` accepts it in place of a checkpoint of tensors."""

    folder: pathlib.Path
    manifest: Manifest

    def restore(
        self,
        specs: ParamTree,
        target: np.dtype[Any],
        place: Place,
        progress: Callable[[int, int, str], None] | None = None,
        check_finite: bool = False,
    ) -> dict[str, Any]:
        """Restore parameters as `jaxinfer.weights.load_params` does, two at a time and without rearranging any array.

        Only the chunks that the requested slices touch are read. Each is verified against its checksum in the manifest.

        Args:
            specs: as the model is sharded: with replicated KV heads if there are fewer of them than devices.
            target: dtype of the parameters; values of another dtype are converted, rounding to nearest even.

        Raises:
            CheckpointError: manifest, model and files do not agree, or data is corrupt.
        """
        leaves = [(array_name(path), path, spec) for path, spec in walk_specs(specs)]
        _check_names(self.folder, self.manifest, [name for name, _, _ in leaves])
        chunks = concurrent.futures.ThreadPoolExecutor(min(_MOST_CHUNKS, os.cpu_count() or 1))
        reader = _Reader(self.folder, self.manifest, target, check_finite, progress, chunks)
        for name, _, spec in leaves:
            reader.check(name, spec)
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as threads:
            done = dict(zip((path for _, path, _ in leaves), threads.map(reader.placed(place), leaves), strict=True))
        return map_specs(lambda path, spec: done[path], specs)


def _check_names(folder: pathlib.Path, manifest: Manifest, wanted: Sequence[str]) -> None:
    if missing := [name for name in wanted if name not in manifest.arrays]:
        raise CheckpointError(f"{folder} lacks arrays that config.json asks for: {listed(missing)}")
    known = set(wanted)
    if unused := [name for name in manifest.arrays if name not in known]:
        raise CheckpointError(
            f"{folder} holds arrays that the model in config.json has no place for: {listed(sorted(unused))}"
        )


@dataclasses.dataclass
class _Reader:
    """Reads arrays from several threads, and counts the bytes."""

    folder: pathlib.Path
    manifest: Manifest
    target: np.dtype[Any]
    check_finite: bool
    progress: Callable[[int, int, str], None] | None
    threads: concurrent.futures.ThreadPoolExecutor
    done: int = 0
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def placed(self, place: Place) -> Callable[[tuple[str, Path, ParamSpec]], Any]:
        def one(leaf: tuple[str, Path, ParamSpec]) -> Any:
            name, path, spec = leaf
            made = jax.block_until_ready(place(path, spec, functools.partial(self.fill, name, spec)))
            self._report(name)
            return made

        return one

    def _report(self, name: str) -> None:
        if self.progress is None:
            return
        with self._lock:
            self.done += self.manifest.arrays[name].nbytes
            self.progress(self.done, self.manifest.nbytes, name)

    def check(self, name: str, spec: ParamSpec) -> None:
        """Raise CheckpointError if the shape or dtype of an array does not fit the parameter."""
        array, label = self.manifest.arrays[name], f"array {quoted(name)} of {self.folder}"
        if array.shape != spec.shape and parts_of_copies(spec, array.shape, ()) is None:
            raise CheckpointError(
                f"{label} has shape {list(array.shape)} where the model on these devices asks {list(spec.shape)}"
            )
        wanted = dtype_of(spec, self.target).name
        if array.dtype != wanted and not (array.dtype in FLOATS and wanted in FLOATS):
            raise CheckpointError(f"{label} is stored as {array.dtype} and cannot be read as {wanted}")

    def fill(self, name: str, spec: ParamSpec, index: Index) -> np.ndarray:
        """Return a new buffer with the slice of a parameter at an index."""
        array, dtype = self.manifest.arrays[name], dtype_of(spec, self.target)
        buffer = new_buffer(shape_at(spec.shape, index), dtype)
        pieces = [((), whole_index(index, spec.shape))] if array.shape == spec.shape else None
        for where, part in pieces or parts_of_copies(spec, array.shape, index) or ():
            self._read(name, array, part, _at(buffer, where))
        if self.check_finite and dtype.name in FLOATS and not all_finite(buffer):
            raise CheckpointError(f"array {quoted(name)} of {self.folder} holds NaN or infinite values as {dtype.name}")
        return buffer

    def _read(self, name: str, array: StoredArray, part: Index, into: np.ndarray) -> None:
        """Read a slice of a stored array, converted if the buffer has another dtype."""
        stored = _paired(part) if array.paired else part
        same = into.dtype == array.stored_dtype and array.dtype not in NIBBLES
        raw = into if same else new_buffer(tuple(each.stop - each.start for each in stored), array.stored_dtype)
        read = functools.partial(_read_chunk, self.folder / array_folder(name), array, stored, raw)
        try:
            for _ in self.threads.map(read, _touched(array, stored)):
                pass
        except OSError as error:
            reason = error.strerror or str(error)
            raise CheckpointError(f"array {quoted(name)} of {self.folder} cannot be read: {reason}") from error
        if array.dtype in NIBBLES:
            into[...] = _nibbles(raw, array, part)
        elif not same:
            self._convert(name, raw, into)

    def _convert(self, name: str, raw: np.ndarray, into: np.ndarray) -> None:
        try:
            with np.errstate(over="raise", invalid="ignore"):
                into[...] = raw
        except FloatingPointError:
            label = f"array {quoted(name)} of {self.folder}"
            raise CheckpointError(f"{label} holds values too large for {into.dtype.name}") from None


def _paired(part: Index) -> Index:
    """Return the byte index of a slice of values stored two to a byte."""
    return (*part[:-1], slice(part[-1].start // 2, -(-part[-1].stop // 2)))


def _nibbles(raw: np.ndarray, array: StoredArray, part: Index) -> np.ndarray:
    """Unpack 4-bit values to one value per element."""
    if array.paired:
        begin = part[-1].start % 2
        both = np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1)
        raw = both[..., begin : begin + part[-1].stop - part[-1].start]
    if array.dtype == "uint4":
        return raw.astype(DTYPES["uint4"])
    return ((raw.astype(np.int8) & 15 ^ 8) - 8).astype(DTYPES["int4"])


def _at(buffer: np.ndarray, where: Index) -> np.ndarray:
    """Return a view of a buffer, which may have no dimensions."""
    view: np.ndarray = buffer[(*where, ...)]  # type: ignore[arg-type]
    return view


def _touched(array: StoredArray, part: Index) -> Iterator[tuple[int, ...]]:
    """Return the grid indices of the chunks that overlap a slice."""
    ranges = (range(each.start // size, -(-each.stop // size)) for each, size in zip(part, array.chunk, strict=True))
    return itertools.product(*ranges)


def _read_chunk(
    folder: pathlib.Path, array: StoredArray, part: Index, into: np.ndarray, place: tuple[int, ...]
) -> None:
    """Read the overlap of a slice and a chunk into the slice; without a copy if it is the whole chunk and contiguous.

    Raises:
        CheckpointError: the chunk is not the one that was written.
    """
    begins = [at * size for at, size in zip(place, array.chunk, strict=True)]
    ends = zip(begins, array.chunk, part, strict=True)
    met = [(max(low, each.start), min(low + size, each.stop)) for low, size, each in ends]
    where = tuple(slice(low - each.start, high - each.start) for (low, high), each in zip(met, part, strict=True))
    inside = tuple(slice(low - begin, high - begin) for (low, high), begin in zip(met, begins, strict=True))
    target = _at(into, where)
    straight = target.shape == array.chunk and target.flags.c_contiguous
    chunk = target if straight else new_buffer(array.chunk, array.stored_dtype)
    _fill(chunk, folder / chunk_file(place), array.checksums[_flat(place, array.grid)])
    if not straight:
        target[...] = chunk[inside]


def _fill(chunk: np.ndarray, path: pathlib.Path, wanted: str) -> None:
    data, done = memoryview(chunk.reshape(-1).view(np.uint8)), 0
    with path.open("rb", buffering=0) as file:
        while done < len(data) and (read := file.readinto(data[done:])):
            done += read
    if done < len(data) or checksum(data) != wanted:
        raise CheckpointError(f"{path} is damaged: it does not have the checksum that the manifest has")


def _flat(place: tuple[int, ...], grid: tuple[int, ...]) -> int:
    flat = 0
    for step, size in zip(place, grid, strict=True):
        flat = flat * size + step
    return flat
