"""Load the parameters of a model folder, one tensor at a time."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxinfer.parallel.processes import at
from jaxinfer.types import ParamSpec, ParamTree, Source, map_specs, walk_specs
from jaxinfer.weights.buffers import all_finite, copy_blocks, new_buffer
from jaxinfer.weights.errors import CheckpointError, listed, quoted, shape_text
from jaxinfer.weights.native.reader import ConvertedCheckpoint
from jaxinfer.weights.safetensors.checkpoint import Tensors, open_checkpoint, read_json_object
from jaxinfer.weights.safetensors.reader import TensorInfo
from jaxinfer.weights.tree import (
    PARTS,
    Fill,
    Index,
    Path,
    Place,
    as_placed,
    check_spec,
    dtype_of,
    overlap,
    placed_size,
    shape_at,
    target_dtype,
)

Progress = Callable[[int, int, str], None]

# Tensors written by older exporters; all readers compute them instead.
HARMLESS = ("*rotary_emb.inv_freq", "*rotary_emb.cos_cached", "*rotary_emb.sin_cached")

_FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float32"}
_CONFIG_DTYPES = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float32", "float64": "float32"}


def on_default_device(path: Path, spec: ParamSpec, fill: Fill) -> jax.Array:
    """Place the whole parameter on JAX's default device: the simplest ``place``."""
    del path, spec
    return jax.device_put(fill(()))


def on_devices(sharding: jax.sharding.Sharding, spec: ParamSpec, fill: Fill) -> jax.Array:
    """Place a parameter sharded over devices: each shard is read once and dropped when all its devices have a copy."""
    holders: dict[tuple[tuple[int, int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
        ends = zip(index or (), spec.shape, strict=True)
        holders.setdefault(tuple(part.indices(size) for part, size in ends), []).append(device)
    parts: list[jax.Array] = []
    for key, devices in holders.items():
        buffer = fill(tuple(slice(*ends) for ends in key))
        some = [jax.device_put(buffer, at(device, sharding)) for device in devices]
        _wait(some)
        parts += some
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, parts)


@dataclasses.dataclass(frozen=True, eq=False)
class Deferred:
    """An array of a checkpoint that is read anew on every conversion to numpy; ``fill`` reads a slice of it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Fill

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        value = self.fill(())
        return value if dtype is None else value.astype(dtype, copy=False)

    def __getitem__(self, where: tuple[slice | int, ...]) -> np.ndarray:
        """Read the part at an index of a `Source`, as numpy indexes an array."""
        places = (*where, *(slice(None),) * (len(self.shape) - len(where)))
        taken = [
            range(size)[place if isinstance(place, slice) else slice(place, place + 1)]
            for place, size in zip(places, self.shape, strict=True)
        ]
        block = self.fill(tuple(slice(each[0], each[-1] + 1) for each in taken))
        steps = (slice(None, None, each.step) for each in taken)
        return block[tuple(step if isinstance(at, slice) else 0 for at, step in zip(places, steps, strict=True))]


def deferred(dtype: np.dtype[Any]) -> Place:
    """Return a ``place`` for `load_params` that leaves every parameter unread. ``dtype``: dtype of the model."""

    def place(path: Path, spec: ParamSpec, fill: Fill) -> Deferred:
        del path
        return Deferred(spec.shape, dtype_of(spec, dtype), fill)

    return place


def load_params(
    folder: str | pathlib.Path | Tensors | ConvertedCheckpoint,
    specs: ParamTree,
    dtype: str,
    place: Place = on_default_device,
    progress: Progress | None = None,
    check_finite: bool = False,
    ignore: Sequence[str] = (),
) -> dict[str, Any]:
    """Fill a parameter tree from a folder of safetensors.

    ``place`` requests each parameter, whole or in slices; a host buffer of that shape is filled from the sources and
    dropped when the device has it. The host therefore holds at most one such slice beyond what ``place`` keeps, and
    reads no other data. All headers and shapes are checked before the first tensor is read.

    Args:
        folder: holds model.safetensors or its shards with their index; or a checkpoint that is already open.
        specs: the parameters and the checkpoint tensors that fill them.
        dtype: "float32", "bfloat16", "float16", or "auto" for ``checkpoint_dtype(folder)``.
        place: called with the path, the spec, and a function that fills a buffer; its result becomes the leaf.
        progress: called after each tensor or slice of one with the checkpoint bytes done, the total bytes (if every
            slice is requested once), and the tensor's name.
        check_finite: reject NaN and infinities, including those that the conversion to ``dtype`` produces.
        ignore: patterns (``*``, ``?``) of tensor names that may be in the checkpoint unused, in addition to
            ``HARMLESS``; for example "lm_head.weight" with tied embeddings.

    Returns:
        A nested dict of the form of ``specs``.

    Raises:
        CheckpointError: a file, shape, dtype or value is invalid, or a tensor is missing or unused.
        ValueError: ``dtype`` is unknown, or the specs are inconsistent.
    """
    if isinstance(folder, ConvertedCheckpoint):
        wanted = folder.manifest.dtype if dtype == "auto" else dtype
        return folder.restore(specs, target_dtype(wanted), place, progress, check_finite)
    checkpoint = open_checkpoint(pathlib.Path(folder)) if isinstance(folder, str | pathlib.Path) else folder
    parameters = list(walk_specs(specs))
    target = target_dtype(checkpoint_dtype(checkpoint) if dtype == "auto" else dtype)
    for path, spec in parameters:
        check_spec(path, spec)
    sources = [source for _, spec in parameters for source in spec.sources]
    _check_names(checkpoint, sources, (*HARMLESS, *ignore))
    _check_tensors(checkpoint, parameters)
    total = sum(_part_bytes(checkpoint, source) for source in sources)
    filler = _Filler(checkpoint, target, check_finite, progress, total)

    def make(path: Path, spec: ParamSpec) -> Any:
        placed = place(path, spec, functools.partial(filler.fill, spec))
        _wait(placed)
        return placed

    return map_specs(make, specs)


def _part_bytes(checkpoint: Tensors, source: Source) -> int:
    info = checkpoint.tensors[source.name]
    return info.nbytes // max(1, math.prod(source.shape)) * placed_size(source)


def _wait(placed: Any) -> None:
    """Wait until the transfer to the device is complete: pending transfers would keep several host buffers alive."""
    for leaf in jax.tree.leaves(placed):
        if isinstance(leaf, jax.Array):
            leaf.block_until_ready()


def checkpoint_dtype(folder: str | pathlib.Path | Tensors) -> str:
    """Return the dtype that "auto" selects for a folder: from config.json, else from the first floating-point tensor.

    float64 is read as "float32".

    Raises:
        CheckpointError: the folder or its config.json cannot be read, or it holds no floating-point tensor.
    """
    opened = open_checkpoint(pathlib.Path(folder)) if isinstance(folder, str | pathlib.Path) else folder
    path = opened.folder / "config.json"
    return auto_dtype(read_json_object(path) if path.exists() else {}, opened)


def auto_dtype(config: Mapping[str, Any], checkpoint: Tensors) -> str:
    """Return `checkpoint_dtype` for an already parsed config.json and an open checkpoint."""
    named = config.get("dtype") or config.get("torch_dtype")
    if isinstance(named, str) and named.removeprefix("torch.") in _CONFIG_DTYPES:
        return _CONFIG_DTYPES[named.removeprefix("torch.")]
    for info in checkpoint.tensors.values():
        if info.dtype in _FLOATS:
            return _FLOATS[info.dtype]
    raise CheckpointError(f"{checkpoint.folder} holds no floating-point tensor")


def _check_names(checkpoint: Tensors, sources: Sequence[Source], ignore: Sequence[str]) -> None:
    wanted = dict.fromkeys(source.name for source in sources)
    missing = [name for name in wanted if name not in checkpoint.tensors]
    if missing:
        raise CheckpointError(
            f"{checkpoint.folder} lacks {_tensors(missing)} that config.json asks for: {listed(missing)}"
        )
    listed_infos = (info for info in checkpoint.tensors.values() if info.listed)
    unused = [info.name for info in listed_infos if info.name not in wanted and not _matches(info.name, ignore)]
    if unused:
        raise CheckpointError(
            f"{checkpoint.folder} holds {_tensors(unused)} that the model in config.json has no place for: "
            f"{listed(unused)}"
        )


def _tensors(names: Sequence[str]) -> str:
    return "a tensor" if len(names) == 1 else f"{len(names)} tensors"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _check_tensors(checkpoint: Tensors, parameters: Sequence[tuple[Path, ParamSpec]]) -> None:
    for part, source in ((spec.dtype, source) for _, spec in parameters for source in spec.sources):
        info = checkpoint.tensors[source.name]
        label = f"tensor {quoted(source.name)} of {checkpoint.folder}"
        if info.shape != source.shape:
            raise CheckpointError(
                f"{label} has shape {shape_text(info.shape)} where config.json asks {shape_text(source.shape)}"
            )
        if info.dtype not in _FLOATS and info.dtype != part:
            raise CheckpointError(f"{label} is stored as {info.dtype}: only F16, BF16, F32 and F64 weights are read")


@dataclasses.dataclass
class _Filler:
    """Fills host buffers from a checkpoint and counts the bytes read."""

    checkpoint: Tensors
    target: np.dtype[Any]
    check_finite: bool
    progress: Progress | None
    total: int
    done: int = 0

    def fill(self, spec: ParamSpec, index: Index) -> np.ndarray:
        buffer = new_buffer(shape_at(spec.shape, index), dtype_of(spec, self.target))
        for source in spec.sources:
            met = overlap(spec.shape, index, source.where)
            if met is not None:
                self._fill_one(buffer[(*met[0], ...)], source, met[1])
        return buffer

    def _fill_one(self, part: np.ndarray, source: Source, of_source: Index) -> None:
        info = self.checkpoint.tensors[source.name]
        whole: Any = as_placed(self.checkpoint.read(source.name), source)
        tensor: np.ndarray = whole[(*of_source, ...)]
        self.checkpoint.expect(source.name, tensor)
        try:
            # a finite value that overflows the target dtype is an error; NaN and infinity pass through
            with np.errstate(over="raise", invalid="ignore"):
                copy_blocks(part, tensor)
        except FloatingPointError:
            raise CheckpointError(f"{self._label(info)} holds values too large for {part.dtype.name}") from None
        self.checkpoint.release(source.name)
        if self.check_finite and part.dtype.name not in PARTS and not all_finite(part):
            raise CheckpointError(f"{self._label(info)} holds NaN or infinite values as {part.dtype.name}")
        self.done += info.nbytes // max(1, math.prod(source.shape)) * part.size
        if self.progress is not None:
            self.progress(self.done, self.total, source.name)

    def _label(self, info: TensorInfo) -> str:
        return f"tensor {quoted(info.name)} of {self.checkpoint.folder}"
