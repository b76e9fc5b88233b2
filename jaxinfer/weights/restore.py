"""From a converted folder to parameters: each part of an array is read straight into the buffer that a device takes."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from jaxinfer.parallel.heads import parts_of_copies
from jaxinfer.types import ParamSpec, ParamTree
from jaxinfer.weights.errors import CheckpointError, listed, quoted
from jaxinfer.weights.manifest import (
    CHECKSUM_BYTES,
    DTYPES,
    FLOATS,
    NIBBLES,
    Manifest,
    StoredArray,
    array_folder,
    array_name,
    chunk_file,
)
from jaxinfer.weights.tree import Index, Path, Place, build, dtype_of, walk
from jaxinfer.weights.values import all_finite, new_buffer

# More would not read faster, and each of them holds a part of a parameter.
_AT_ONCE = 2

# What TensorStore raises where a file is missing, cut short or damaged.
_FAILURES = (ValueError, OSError, RuntimeError, LookupError, OverflowError)


@dataclasses.dataclass(frozen=True)
class ConvertedCheckpoint:
    """The arrays of a converted folder: what `load_params` takes in the place of tensors."""

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
        """See `jaxinfer.weights.load_params`. Nothing is rearranged on the way, and two parameters are on it at a time.

        Only the chunks that the asked for parts touch are read. Each is compared with its checksum, and that with the
        manifest's.

        Args:
            specs: as the model is spread: with copies of KV heads, where there are fewer of them than devices.
            target: the parameters' dtype; another one than the folder's is converted to, to nearest even.

        Raises:
            CheckpointError: manifest, model and files do not agree, or bytes are damaged.
        """
        leaves = [(array_name(path), path, spec) for path, spec in walk(specs)]
        _check_names(self.folder, self.manifest, [name for name, _, _ in leaves])
        reader = _Reader(self.folder, self.manifest, target, check_finite, progress)
        for name, _, spec in leaves:
            reader.check(name, spec)
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as threads:
            done = dict(zip((path for _, path, _ in leaves), threads.map(reader.placed(place), leaves), strict=True))
        return build(specs, lambda path, spec: done[path])


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
    """Reads arrays, from several threads, and counts the bytes."""

    folder: pathlib.Path
    manifest: Manifest
    target: np.dtype[Any]
    check_finite: bool
    progress: Callable[[int, int, str], None] | None
    done: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})

    def placed(self, place: Place) -> Callable[[tuple[str, Path, ParamSpec]], Any]:
        def one(leaf: tuple[str, Path, ParamSpec]) -> Any:
            name, path, spec = leaf
            made = jax.block_until_ready(place(path, spec, functools.partial(self.fill, name, spec)))
            self._tell(name)
            return made

        return one

    def _tell(self, name: str) -> None:
        if self.progress is None:
            return
        with self._lock:
            self.done += self.manifest.arrays[name].nbytes
            self.progress(self.done, self.manifest.nbytes, name)

    def check(self, name: str, spec: ParamSpec) -> None:
        """Raises CheckpointError where an array cannot become the parameter."""
        array, label = self.manifest.arrays[name], f"array {quoted(name)} of {self.folder}"
        if array.shape != spec.shape and parts_of_copies(spec, array.shape, ()) is None:
            raise CheckpointError(
                f"{label} has shape {list(array.shape)} where the model on these devices asks {list(spec.shape)}"
            )
        wanted = dtype_of(spec, self.target).name
        if array.dtype != wanted and not (array.dtype in FLOATS and wanted in FLOATS):
            raise CheckpointError(f"{label} is stored as {array.dtype} and cannot be read as {wanted}")

    def fill(self, name: str, spec: ParamSpec, index: Index) -> np.ndarray:
        """A new buffer with the part of a parameter at an index."""
        array, dtype = self.manifest.arrays[name], dtype_of(spec, self.target)
        buffer = new_buffer(_shape_of(spec.shape, index), dtype)
        pieces = [((), _whole(index, spec.shape))] if array.shape == spec.shape else None
        for where, part in pieces or parts_of_copies(spec, array.shape, index) or ():
            self._read(name, array, part, buffer[(*where, ...)])
        if self.check_finite and dtype.name in FLOATS and not all_finite(buffer):
            raise CheckpointError(f"array {quoted(name)} of {self.folder} holds NaN or infinite values as {dtype.name}")
        return buffer

    def _read(self, name: str, array: StoredArray, part: Index, into: np.ndarray) -> None:
        """The part of a stored array, converted where the buffer has another dtype."""
        stored = _paired(part) if array.paired else part
        same = into.dtype == array.stored_dtype and array.dtype not in NIBBLES
        raw = into if same else np.empty([each.stop - each.start for each in stored], array.stored_dtype)
        folder = self.folder / array_folder(name)
        try:
            store = ts.open(_spec(folder, array), open=True, read=True, assume_metadata=True, context=self._context)
            ts.array(raw).write(store.result()[stored]).result()
            _compare(folder, array, stored)
        except _FAILURES as error:
            raise CheckpointError(f"array {quoted(name)} of {self.folder} cannot be read: {_reason(error)}") from error
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
    """A part of values of which two lie in a byte, as bytes."""
    return (*part[:-1], slice(part[-1].start // 2, -(-part[-1].stop // 2)))


def _nibbles(raw: np.ndarray, array: StoredArray, part: Index) -> np.ndarray:
    """Values of 4 bits in bytes of their own."""
    if array.paired:
        begin = part[-1].start % 2
        both = np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1)
        raw = both[..., begin : begin + part[-1].stop - part[-1].start]
    if array.dtype == "uint4":
        return raw.astype(DTYPES["uint4"])
    return ((raw.astype(np.int8) & 15 ^ 8) - 8).astype(DTYPES["int4"])


def _spec(folder: pathlib.Path, array: StoredArray) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder.absolute()}/"},
        "metadata": array.zarr(),
        "fill_missing_data_reads": False,
    }


def _compare(folder: pathlib.Path, array: StoredArray, part: Index) -> None:
    """Raises ValueError where a chunk that a part touches is not the manifest's. Its own checksum was right."""
    for place, found in checksums(folder, array, part):
        if found != array.checksums[place]:
            raise ValueError("a chunk is not the one whose checksum the manifest has")


def checksums(folder: pathlib.Path, array: StoredArray, part: Index) -> Iterable[tuple[int, str]]:
    """The checksums that the files of an array end in, of the chunks that a part touches, with their places."""
    ranges = [range(each.start // size, -(-each.stop // size)) for each, size in zip(part, array.chunk, strict=True)]
    for place in itertools.product(*ranges):
        with (folder / chunk_file(place)).open("rb") as file:
            file.seek(-CHECKSUM_BYTES, os.SEEK_END)
            yield _flat(place, array.grid), file.read().hex()


def _flat(place: tuple[int, ...], grid: tuple[int, ...]) -> int:
    flat = 0
    for step, size in zip(place, grid, strict=True):
        flat = flat * size + step
    return flat


def _whole(index: Index, shape: tuple[int, ...]) -> Index:
    """The index with a beginning and an end for every dimension."""
    parts = index or (slice(None),) * len(shape)
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(parts, shape, strict=True))


def _shape_of(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    return tuple(each.stop - each.start for each in _whole(index, shape))


def _reason(error: BaseException) -> str:
    """TensorStore's sentence without where in its source it arose."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if text.startswith("DATA_LOSS"):
        return "a chunk does not have the checksum that stands behind it"
    return quoted(text.partition(" [")[0])
