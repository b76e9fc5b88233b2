"""GGUF files (llama.cpp) as checkpoints: a model's config.json, its plain tensors, and its quantised weights.

``docs/gguf.md`` lists the architectures and the types of blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import pathlib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.gguf import GgufError, GgufTensor, Header, Metadata
from jaxinfer.quant.ggml import KINDS
from jaxinfer.weights.errors import CheckpointError, quoted
from jaxinfer.weights.gguf.blocks import layout_of, numbers, part_of
from jaxinfer.weights.gguf.config import config_json
from jaxinfer.weights.gguf.described import Described
from jaxinfer.weights.gguf.names import Target, targets
from jaxinfer.weights.quantized import StoredWeight
from jaxinfer.weights.safetensors.reader import TensorInfo

MAX_FILES = 1000
MAX_NAMES = 1 << 20
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII)
_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "F32": np.dtype("<f4"),
        "F16": np.dtype("<f2"),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F64": np.dtype("<f8"),
        "I8": np.dtype("i1"),
        "I16": np.dtype("<i2"),
        "I32": np.dtype("<i4"),
        "I64": np.dtype("<i8"),
    }
)


class GgufFile:
    """The tensors of one GGUF file.

    Attributes:
        path: where the file is.
        metadata: its key-value pairs.
        tensors: what it holds, by ggml's names.

    Raises:
        CheckpointError: the file is missing, truncated, or not what the format allows.
    """

    def __init__(self, path: pathlib.Path) -> None:
        try:
            header = Header(path)
        except GgufError as error:
            raise CheckpointError(str(error)) from error
        self.path, self.metadata, self.tensors, self._map = path, header.metadata, header.tensors, header.data

    def read(self, name: str, matrix: int | None = None) -> np.ndarray:
        """The tensor, or one matrix of a stack, as a read-only view: numbers, or uint8 [*out, blocks, bytes]."""
        info = self.tensors[name]
        shape = info.shape if matrix is None else info.shape[1:]
        start, _ = self.span(name, matrix)
        if info.kind in KINDS:
            kind = KINDS[info.kind]
            form = (*shape[:-1], shape[-1] // kind.elements, kind.bytes)
            return np.ndarray(form, np.uint8, buffer=self._map, offset=start)
        return np.ndarray(shape, _DTYPES[info.kind], buffer=self._map, offset=start)

    def expect(self, name: str, part: np.ndarray) -> None:
        """Tells the operating system that a view of a whole tensor, or a part of it, is needed soon."""
        begin = np.lib.array_utils.byte_bounds(self.read(name))[0]
        low, high = np.lib.array_utils.byte_bounds(part)
        if high - low <= part.nbytes:
            self._advise("MADV_WILLNEED", self.tensors[name].start + low - begin, high - low)

    def release(self, name: str, matrix: int | None = None) -> None:
        """Lets the operating system take back the memory behind what `read` gave; views of it stay valid."""
        self._advise("MADV_DONTNEED", *self.span(name, matrix))

    def span(self, name: str, matrix: int | None = None) -> tuple[int, int]:
        """Offset in the file of a tensor, or of one matrix of it, and its number of bytes."""
        info = self.tensors[name]
        if matrix is None:
            return info.start, info.nbytes
        nbytes = info.nbytes // info.shape[0]
        return info.start + matrix * nbytes, nbytes

    def _advise(self, advice: str, start: int, nbytes: int) -> None:
        if not hasattr(mmap, advice):
            return
        begin = start - start % mmap.PAGESIZE
        # only a hint: a file system that does not know it reads well without
        with contextlib.suppress(OSError):
            self._map.madvise(getattr(mmap, advice), begin, start + nbytes - begin)


class GgufCheckpoint:
    """The tensors of a model under their Hugging Face names; see `Checkpoint`.

    Attributes:
        folder: the (first) file.
        config_json: what config.json would say.
        metadata: the file's key-value pairs: the tokenizer's are read by `jaxinfer.text.gguf`.
        tensors: the plain ones.
        weights: those in blocks.
    """

    def __init__(self, files: list[GgufFile]) -> None:
        self.folder = files[0].path
        self.metadata: Metadata = files[0].metadata
        homes = _homes(files)
        self._model = Described(
            self.folder,
            self.metadata,
            {name: file.tensors[name].shape for name, file in homes.items()},
            lambda name: _Plain(homes[name], name, Target(name)).read(),
        )
        self.config_json: Mapping[str, Any] = MappingProxyType(
            {**config_json(self._model), "torch_dtype": _usual_dtype(homes)}
        )
        self._plain: dict[str, _Plain | _LatentUp] = {}
        weights: dict[str, StoredWeight] = {}
        for name, file in homes.items():
            self._sort(file, name, weights)
        self._join_latents(homes)
        self.weights: Mapping[str, StoredWeight] = MappingProxyType(weights)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: plain.info(name) for name, plain in self._plain.items()}
        )

    def read(self, name: str) -> np.ndarray:
        """A plain tensor: a read-only view of the file, or a new buffer where the file has it in another form."""
        return self._plain[name].read()

    def expect(self, name: str, part: np.ndarray) -> None:
        """Prefetch a part of a tensor, a view of what `read` gave, into memory."""
        self._plain[name].expect(part)

    def release(self, name: str) -> None:
        """Gives back the memory behind a tensor that was read."""
        self._plain[name].release()

    def _sort(self, file: GgufFile, name: str, weights: dict[str, StoredWeight]) -> None:
        for target in targets(self._model, name):
            if target.name in self._plain or target.name in weights:
                raise CheckpointError(f"{file.path} holds {quoted(target.name)} twice, as {quoted(name)} at last")
            if len(self._plain) + len(weights) >= MAX_NAMES:
                raise CheckpointError(f"{file.path} holds more than {MAX_NAMES} tensors")
            plain = _Plain(file, name, target)
            stored = file.tensors[name].kind in KINDS and len(plain.shape) == 2 and not target.shift
            if stored:
                weights[target.name] = _stored(plain)
            else:
                self._plain[target.name] = plain

    def _join_latents(self, homes: Mapping[str, GgufFile]) -> None:
        """Join DeepSeek's ``kv_b_proj``, which newer files hold in two parts, one of them transposed."""
        for keys in [name for name in self._plain if name.endswith(".attn_k_b.weight")]:
            values = keys.replace(".attn_k_b.", ".attn_v_b.")
            layer = keys.split(".")[1]
            if self._model.architecture != "deepseek2" or values not in self._plain:
                continue
            joined = _LatentUp(_Plain(homes[keys], keys, Target(keys)), _Plain(homes[values], values, Target(values)))
            if joined.fits:
                del self._plain[keys], self._plain[values]
                self._plain[f"model.layers.{layer}.self_attn.kv_b_proj.weight"] = joined


def open_gguf(path: pathlib.Path) -> GgufCheckpoint:
    """Opens a GGUF file, or the first of several that make one model, and checks all of its headers.

    Raises:
        CheckpointError: a file is missing or damaged, its model is of an unknown architecture, or its metadata lacks
            what the model cannot do without.
    """
    try:
        return GgufCheckpoint(_files(path))
    except GgufError as error:  # of an array of the metadata, which is read only now
        raise CheckpointError(str(error)) from error


def _files(path: pathlib.Path) -> list[GgufFile]:
    first = GgufFile(path)
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MAX_FILES:
        raise CheckpointError(f"{path} says that it is one of {quoted(str(count))} files")
    if count <= 1:
        return [first]
    found = _PART.fullmatch(path.name)
    if found is None or found[2] != "00001" or int(found[3]) != count:
        raise CheckpointError(
            f"{path} is one of {count} files: pass the first, whose name ends in -00001-of-{count:05d}.gguf"
        )
    rest = [path.with_name(f"{found[1]}-{index:05d}-of-{count:05d}.gguf") for index in range(2, count + 1)]
    return [first, *map(GgufFile, rest)]


def _homes(files: list[GgufFile]) -> dict[str, GgufFile]:
    homes: dict[str, GgufFile] = {}
    for file in files:
        for name in file.tensors:
            if name in homes:
                raise CheckpointError(f"{file.path} holds tensor {quoted(name)}, which {homes[name].path} holds, too")
            homes[name] = file
    return homes


def _usual_dtype(homes: Mapping[str, GgufFile]) -> str:
    """Dtype of the matrices where all are plain; bfloat16 for a model in blocks."""
    kinds = {file.tensors[name].kind for name, file in homes.items() if len(file.tensors[name].shape) > 1}
    if kinds <= {"F16"} and kinds:
        return "float16"
    return "float32" if kinds <= {"F32", "F64"} else "bfloat16"


@dataclasses.dataclass(frozen=True)
class _Plain:
    """Numbers of a tensor as its target has them; blocks are dequantised."""

    file: GgufFile
    name: str
    target: Target

    @property
    def source(self) -> GgufTensor:
        return self.file.tensors[self.name]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the Hugging Face checkpoint."""
        shape = self.source.shape if self.target.expert is None else self.source.shape[1:]
        shape = (1, *shape) if self.target.matrix and len(shape) == 1 else shape
        return shape[::-1] if self.target.transposed and self.source.kind not in KINDS else shape

    def info(self, name: str) -> TensorInfo:
        kind = "F32" if self.source.kind in KINDS or self.target.shift else self.source.kind
        start, nbytes = self.file.span(self.name, self.target.expert)
        return TensorInfo(name, kind, self.shape, start, nbytes)

    def stored(self) -> np.ndarray:
        """Numbers or blocks, rows in the model's order."""
        rows = self.file.read(self.name, self.target.expert)
        return rows if self.target.order is None else rows[self.target.order(rows.shape[0])]

    def read(self) -> np.ndarray:
        rows = self.stored()
        if self.source.kind in KINDS:
            values = numbers(self.source.kind, rows.reshape(-1, *rows.shape[-2:]))
            rows = values.reshape(self.source.shape if self.target.expert is None else self.source.shape[1:])
        if self.target.shift:
            rows = rows.astype(np.float32) + np.float32(self.target.shift)
        return rows.T if self.target.transposed else rows.reshape(self.shape)

    def expect(self, part: np.ndarray) -> None:
        if self._is_view:
            self.file.expect(self.name, part)

    def release(self) -> None:
        self.file.release(self.name, self.target.expert)

    @property
    def _is_view(self) -> bool:
        changed = self.target.shift or self.target.order is not None or self.target.expert is not None
        return not changed and self.source.kind not in KINDS


def _stored(plain: _Plain) -> StoredWeight:
    kind, label = plain.source.kind, f"tensor {quoted(plain.name)} of {plain.file.path}"

    def read(part: str) -> np.ndarray:
        try:
            array = part_of(kind, part, plain.stored())
        except CheckpointError as error:
            raise CheckpointError(f"{label} has {error}") from None
        plain.release()
        return array

    return StoredWeight(plain.shape, layout_of(kind), read, plain.info(plain.name).nbytes)


@dataclasses.dataclass(frozen=True)
class _LatentUp:
    """``kv_b_proj`` [heads * (nope + value), rank] of keys [heads, rank, nope] and values [heads, value, rank]."""

    keys: _Plain
    values: _Plain

    @property
    def fits(self) -> bool:
        keys, values = self.keys.shape, self.values.shape
        return len(keys) == len(values) == 3 and keys[0] == values[0] and keys[1] == values[2]

    def info(self, name: str) -> TensorInfo:
        (heads, rank, nope), value = self.keys.shape, self.values.shape[1]
        nbytes = self.keys.source.nbytes + self.values.source.nbytes
        return TensorInfo(name, "F32", (heads * (nope + value), rank), self.keys.source.start, nbytes)

    def read(self) -> np.ndarray:
        keys, values = (part.read().astype(np.float32) for part in (self.keys, self.values))
        joined = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
        return joined.reshape(-1, joined.shape[-1])

    def expect(self, part: np.ndarray) -> None:
        del part  # it is in memory

    def release(self) -> None:
        self.keys.release()
        self.values.release()
