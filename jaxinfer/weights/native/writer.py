"""Writer of converted folders: an Orbax checkpoint for each top-level parameter subtree, and the manifest last.

Orbax (https://orbax.readthedocs.io) creates each checkpoint: its metadata, its folder under a temporary name, and the
rename on completion; any Orbax installation can restore it. `_Handler` writes the arrays: in chunks aligned with device
shards, uncompressed, each with a checksum. `jaxinfer.weights.native.reader` reads them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import importlib.metadata
import json
import logging
import pathlib
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TextIO

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jaxinfer.types import ParamTree, walk_specs
from jaxinfer.weights.errors import CheckpointError
from jaxinfer.weights.native.layouts import describe
from jaxinfer.weights.native.leaves import Leaf, leaves_of
from jaxinfer.weights.native.manifest import (
    FLOATS,
    MANIFEST,
    PARAMS,
    UNFINISHED,
    Manifest,
    StoredArray,
    array_from_json,
    array_name,
    array_to_json,
    check_files,
    checksum,
    leaf_key,
    write_manifest,
)
from jaxinfer.weights.sidecar import copy_companions

_CHUNKS_AT_ONCE = 4

Progress = Callable[[int, int, str], None]


class _Handler(ocp.type_handlers.TypeHandler):
    """Orbax type handler that writes a `Leaf`, one array at a time. ``written`` has the written arrays by Orbax's
    names.

    The checkpoint's metadata declares numpy arrays, so Orbax restores numpy arrays by default.
    """

    def __init__(self, on_written: Callable[[str, int], None]) -> None:
        self.written: dict[str, StoredArray] = {}
        self._on_written = on_written

    def typestr(self) -> str:
        return "np.ndarray"

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        raise NotImplementedError("this handler only writes")

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        raise NotImplementedError("this handler only writes")

    def memory_size(self, values: Sequence[Leaf]) -> Sequence[tuple[int, int]]:
        return [(leaf.stored.nbytes, leaf.stored.nbytes) for leaf in values]

    async def serialize(self, values: Sequence[Leaf], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        del args
        for leaf, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            folder, array = pathlib.Path(str(info.path)), leaf.stored
            await _write(folder, array, leaf.value(array), info.ts_context)
            self.written[info.name] = dataclasses.replace(array, checksums=tuple(_checksums(folder, array)))
            self._on_written(info.name, array.nbytes)
        return []


def _checksums(folder: pathlib.Path, array: StoredArray) -> Iterator[str]:
    """Yield the checksum of each chunk as read back from disk."""
    for file in array.chunks():
        with (folder / file).open("rb") as opened:
            yield checksum(opened.read(array.value_bytes))


async def _write(folder: pathlib.Path, array: StoredArray, value: np.ndarray, context: Any) -> None:
    """Write a few chunks at a time, so that few are in memory twice."""
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "metadata": array.zarr(),
        "store_data_equal_to_fill_value": True,
    }
    store = await ts.open(spec, create=True, context=context)
    under_way: list[Any] = []
    for place in np.ndindex(array.grid):
        where = tuple(slice(at * size, (at + 1) * size) for at, size in zip(place, array.chunk, strict=True))
        under_way.append(store[where].write(value[where], can_reference_source_data_indefinitely=True))
        if len(under_way) >= _CHUNKS_AT_ONCE:
            await under_way.pop(0)
    for rest in under_way:
        await rest


# ---- folders


@dataclasses.dataclass
class Unfinished:
    """A folder being written under a temporary name next to its final name; see `unfinished`.

    Attributes:
        arrays: the complete arrays, including those of an earlier run.
        storages: layouts of quantised weights passed to `describe`, including those of an earlier run.
    """

    folder: pathlib.Path
    destination: pathlib.Path
    journal: TextIO
    arrays: dict[str, StoredArray] = dataclasses.field(default_factory=dict)
    storages: dict[str, Any] = dataclasses.field(default_factory=dict)

    def write(self, leaves: Mapping[str, Leaf], progress: Progress | None = None) -> None:
        """Write arrays, grouped by top-level name. Arrays that are already complete are kept.

        Args:
            progress: called after each array with bytes done, total bytes and its name.
        """
        parts: dict[str, dict[str, Leaf]] = {}
        for name, leaf in leaves.items():
            parts.setdefault(name.partition("/")[0], {})[name] = leaf
        counter = _ProgressCounter(sum(leaf.stored.nbytes for leaf in leaves.values()), progress)
        for part, members in parts.items():
            if members.keys() <= self.arrays.keys():
                counter.add(part, sum(leaf.stored.nbytes for leaf in members.values()))
            else:
                self._write_part(part, members, counter)

    def _write_part(self, part: str, leaves: Mapping[str, Leaf], counter: _ProgressCounter) -> None:
        handler = _Handler(counter.add)
        registry = ocp.type_handlers.create_type_handler_registry((Leaf, handler))
        keys = {leaf_key(name.partition("/")[2]): name for name in leaves}
        with _quiet(), ocp.Checkpointer(_orbax(registry)) as checkpointer:
            tree = {key: leaves[name] for key, name in keys.items()}
            checkpointer.save(self.folder.absolute() / PARAMS / part, args=ocp.args.PyTreeSave(_nested(tree)))
        written = {keys[key]: array for key, array in handler.written.items()}
        self.arrays |= written
        self.note({"arrays": {name: array_to_json(array) for name, array in written.items()}})

    def keep(self, name: str) -> None:
        """Record a complete file of the folder for a resumed run, which removes unrecorded files."""
        self.note({"file": name})

    def describe(self, storages: Mapping[str, Any]) -> None:
        """Record the layouts of quantised weights before they are written, for `finish`, also of a resumed run."""
        self.storages |= storages
        self.note({"storages": dict(storages)})

    def note(self, line: Mapping[str, Any]) -> None:
        """Append a line to the journal."""
        self.journal.write(json.dumps(line) + "\n")
        self.journal.flush()

    def finish(self, architecture: str, dtype: str, storages: Mapping[str, Any]) -> None:
        """Write the manifest and rename the folder to its final name.

        Raises:
            CheckpointError: the final name was created meanwhile.
        """
        for name, array in self.arrays.items():
            check_files(self.folder, name, array)
        made_by = {"jaxinfer": importlib.metadata.version("jaxinfer"), "orbax-checkpoint": ocp.__version__}
        write_manifest(self.folder, Manifest(architecture, dtype, self.arrays, storages), made_by)
        self.publish()

    def publish(self) -> None:
        """Rename a complete folder to its final name.

        Raises:
            CheckpointError: the final name was created meanwhile.
        """
        refuse_existing(self.destination)
        (self.folder / UNFINISHED).unlink()
        self.folder.rename(self.destination)


@dataclasses.dataclass
class _ProgressCounter:
    total: int
    progress: Progress | None
    done: int = 0

    def add(self, name: str, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total, name)


def _orbax(registry: Any) -> Any:
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_zarr3=True, use_compression=False, type_handler_registry=registry
    )


def _nested(tree: Mapping[str, Leaf]) -> dict[str, Any]:
    """Return keys with dots as a tree, whose paths Orbax joins with dots again."""
    nested: dict[str, Any] = {}
    for key, leaf in tree.items():
        *above, last = key.split(".")
        node = nested
        for name in above:
            node = node.setdefault(name, {})
        node[last] = leaf
    return nested


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Orbax, which logs every step; a warning would be lost among the lines of a progress bar."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def refuse_existing(destination: pathlib.Path) -> None:
    """Raise CheckpointError if the destination exists."""
    if destination.exists() or destination.is_symlink():
        raise CheckpointError(f"{destination} exists already, and is not written over")


@contextlib.contextmanager
def unfinished(destination: pathlib.Path, identity: Mapping[str, Any]) -> Iterator[Unfinished]:
    """Yield a folder to be written, or the folder of an interrupted run with the same ``identity``.

    The files of an interrupted run with another identity are removed.

    Raises:
        CheckpointError: ``destination`` exists, another process is writing it, or its temporary name is in use.
    """
    refuse_existing(destination)
    folder = destination.with_name(f"{destination.name}.unfinished")
    # A manifest without a journal: a run was interrupted just before it renamed the folder.
    ours = (folder / UNFINISHED).exists() or (folder / MANIFEST).exists()
    if folder.exists() and any(folder.iterdir()) and not ours:
        raise CheckpointError(f"{folder} is in the way: it was not made by an interrupted conversion")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / UNFINISHED).open("a+", encoding="utf-8") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{destination} is being written by somebody else") from None
        started = Unfinished(folder, destination, journal)
        _take_up(started, json.loads(json.dumps(identity)))
        yield started


def _take_up(started: Unfinished, identity: Any) -> None:
    """Keep the complete files of an earlier run and remove all other files."""
    started.journal.seek(0)
    lines = list(_lines(started.journal))
    if not lines or lines[0] != {"identity": identity}:
        lines = [{"identity": identity}]
    started.journal.truncate(0)
    for line in lines:
        started.note(line)
        read = {name: array_from_json(plain) for name, plain in line.get("arrays", {}).items()}
        started.arrays |= {name: array for name, array in read.items() if array is not None}
        started.storages |= line.get("storages", {})
    parts = {name.partition("/")[0] for name in started.arrays}
    files = {line["file"] for line in lines if "file" in line}
    _clear(started.folder, {UNFINISHED, *files, *([PARAMS] if parts else [])})
    _clear(started.folder / PARAMS, parts)


def _clear(folder: pathlib.Path, names: Collection[str]) -> None:
    """Remove everything in a folder except these names."""
    for path in folder.glob("*"):
        if path.name not in names:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _lines(journal: TextIO) -> Iterator[dict[str, Any]]:
    """Yield the journal's lines up to one that was truncated."""
    for text in journal:
        try:
            yield json.loads(text)
        except ValueError:
            return


# ---- Python API


@dataclasses.dataclass(frozen=True)
class Saving:
    """A folder that a background thread is writing."""

    _result: concurrent.futures.Future[None]

    @property
    def done(self) -> bool:
        return self._result.done()

    def wait(self) -> None:
        """Wait until the folder is complete and has its final name; raise the error of the write if it failed."""
        self._result.result()


def save_params(
    folder: str | pathlib.Path,
    params: Any,
    specs: ParamTree,
    config_json: Mapping[str, Any],
    *,
    beside: str | pathlib.Path | None = None,
    wait: bool = True,
) -> Saving:
    """Write parameters as a folder that ``--model`` accepts, as ``jaxinfer convert`` does.

    Args:
        folder: must not exist. It appears under its name when it is complete.
        params: of the form of ``specs``; arrays entirely in this process.
        config_json: written as config.json.
        beside: a model folder whose tokenizer and other companion files are copied.
        wait: False: copy the parameters to the host and write them in a background thread; the caller may go on, even
            with a step that donates them. Takes host memory of the size of the parameters.

    Raises:
        CheckpointError: ``folder`` exists or is being written.
        ValueError: a parameter is missing, has another shape than its spec, or cannot be stored.
    """
    leaves = leaves_of(specs, params)
    if not wait:
        leaves = {name: dataclasses.replace(leaf, read=_snapshot(leaf)) for name, leaf in leaves.items()}
    folder, source = pathlib.Path(folder), None if beside is None else pathlib.Path(beside)
    refuse_existing(folder)

    def write() -> None:
        with unfinished(folder, {"params": time.time_ns()}) as started:
            write_folder(started, specs, leaves, config_json, source)

    thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="save_params")
    saving = Saving(thread.submit(write))
    thread.shutdown(wait=False)
    if wait:
        saving.wait()
    return saving


def _snapshot(leaf: Leaf) -> Callable[[], np.ndarray]:
    """Copy the array now, so that its buffer may be donated."""
    value = np.array(leaf.read())
    return lambda: value


def write_folder(
    started: Unfinished,
    specs: ParamTree,
    leaves: Mapping[str, Leaf],
    config_json: Mapping[str, Any],
    source: pathlib.Path | None,
    progress: Progress | None = None,
) -> None:
    """Write all of a folder and rename it to its final name.

    Args:
        leaves: arrays of the parameters of ``specs``, see `leaves_of`.
        source: a folder whose companion files are copied.

    Raises:
        ValueError: the parameters without a fixed dtype do not share one dtype that a model can have.
    """
    dtypes = {leaves[array_name(path)].dtype.name for path, spec in walk_specs(specs) if spec.dtype is None}
    if len(dtypes) != 1 or not dtypes <= set(FLOATS):
        raise ValueError(f"the parameters are of {', '.join(sorted(dtypes))}: they must be of one of {FLOATS}")
    (dtype,) = dtypes
    started.write(leaves, progress)
    if source is not None:
        copy_companions(source, started.folder)
    complete_folder(started, config_json, dtype, describe(specs))


def complete_folder(
    started: Unfinished, config_json: Mapping[str, Any], dtype: str, storages: Mapping[str, Any]
) -> None:
    """Write config.json and the manifest of a folder whose arrays are complete, and rename it to its final name.

    Args:
        storages: see `Manifest`.

    Raises:
        CheckpointError: see `Unfinished.finish`.
    """
    config = {**{key: value for key, value in config_json.items() if key != "torch_dtype"}, "dtype": dtype}
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (started.folder / "config.json").write_text(text + "\n", encoding="utf-8")
    architecture = next(iter(config_json.get("architectures") or [""]))
    started.finish(architecture, dtype, storages)
