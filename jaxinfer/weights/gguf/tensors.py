"""Tensors of GGUF files as a checkpoint has them: rows back in their order, parts joined, blocks as storages."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.gguf import GgufError, GgufTensor, Header
from jaxinfer.quant.ggml import KINDS
from jaxinfer.weights.errors import CheckpointError, quoted
from jaxinfer.weights.gguf.blocks import layout_of, numbers, part_of
from jaxinfer.weights.gguf.naming import Target
from jaxinfer.weights.quantized import StoredWeight
from jaxinfer.weights.safetensors.reader import TensorInfo

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


@dataclasses.dataclass(frozen=True)
class Plain:
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
        if self.target.rows is not None:
            shape = (self.target.rows[1] - self.target.rows[0], *shape[1:])
        shape = (1, *shape) if self.target.matrix and len(shape) == 1 else shape
        return shape[::-1] if self.target.transposed and self.source.kind not in KINDS else shape

    def info(self, name: str) -> TensorInfo:
        kind = "F32" if self.source.kind in KINDS or self.target.shift else self.source.kind
        start, nbytes = self.file.span(self.name, self.target.expert)
        if self.target.rows is not None:
            nbytes = nbytes // self.source.shape[0] * self.shape[0]
        return TensorInfo(name, kind, self.shape, start, nbytes)

    def stored(self) -> np.ndarray:
        """Numbers or blocks, rows in the model's order."""
        rows = self.file.read(self.name, self.target.expert)
        if self.target.rows is not None:
            rows = rows[slice(*self.target.rows)]
        return rows if self.target.order is None else rows[self.target.order(rows.shape[0])]

    def read(self) -> np.ndarray:
        rows = self.stored()
        if self.source.kind in KINDS:
            values = numbers(self.source.kind, rows.reshape(-1, *rows.shape[-2:]))
            rows = values.reshape(*rows.shape[:-2], -1)
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
        target = self.target
        moved = any(each is not None for each in (target.order, target.expert, target.rows))
        return not target.shift and not moved and self.source.kind not in KINDS


def stored_weight(plain: Plain) -> StoredWeight:
    kind, label = plain.source.kind, f"tensor {quoted(plain.name)} of {plain.file.path}"

    def read(part: str) -> np.ndarray:
        try:
            array = part_of(kind, part, plain.stored())
        except CheckpointError as error:
            raise CheckpointError(f"{label} has {error}") from None
        plain.release()
        return array

    return StoredWeight(plain.shape, layout_of(kind), read, plain.info(plain.name).nbytes)
