"""GGUF tensors in checkpoint form: row order restored, fused rows split, blocks exposed as stored weights."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

from jaxinfer.formats.gguf import GgufError, GgufTensor, Header
from jaxinfer.quant.ggml import KINDS
from jaxinfer.weights.buffers import MappedFile
from jaxinfer.weights.errors import CheckpointError, quoted
from jaxinfer.weights.gguf.blocks import layout_of, numbers, part_of
from jaxinfer.weights.gguf.tensor_names import Target
from jaxinfer.weights.quantized import StoredWeight
from jaxinfer.weights.safetensors.reader import DTYPES, TensorInfo


class GgufFile(MappedFile):
    """The tensors of one GGUF file.

    Attributes:
        path: path of the file.
        metadata: key-value pairs of the file.
        tensors: the tensors by ggml's names.

    Raises:
        CheckpointError: the file is missing, truncated or invalid.
    """

    def __init__(self, path: pathlib.Path) -> None:
        try:
            header = Header(path)
        except GgufError as error:
            raise CheckpointError(str(error)) from error
        self.path, self.metadata, self.tensors, self._map = path, header.metadata, header.tensors, header.data

    def read(self, name: str, matrix: int | None = None) -> np.ndarray:
        """Return a tensor, or one matrix of a stack, as a read-only view: values, or uint8 [*out, blocks, bytes]."""
        info = self.tensors[name]
        shape = info.shape if matrix is None else info.shape[1:]
        start, _ = self.span(name, matrix)
        if info.kind in KINDS:
            kind = KINDS[info.kind]
            form = (*shape[:-1], shape[-1] // kind.elements, kind.bytes)
            return np.ndarray(form, np.uint8, buffer=self._map, offset=start)
        return np.ndarray(shape, DTYPES[info.kind], buffer=self._map, offset=start)

    def release(self, name: str, matrix: int | None = None) -> None:
        """Let the operating system reclaim the pages of a tensor; views of it stay valid."""
        self._advise("MADV_DONTNEED", *self.span(name, matrix))

    def span(self, name: str, matrix: int | None = None) -> tuple[int, int]:
        """Return the offset in the file of a tensor, or of one matrix of a stack, and its size in bytes."""
        info = self.tensors[name]
        if matrix is None:
            return info.start, info.nbytes
        nbytes = info.nbytes // info.shape[0]
        return info.start + matrix * nbytes, nbytes


@dataclasses.dataclass(frozen=True)
class Plain:
    """Values of a tensor in the form of its target; blocks are dequantized."""

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
        shape = (shape[0], 1, shape[1]) if self.target.taps and len(shape) == 2 else shape
        return shape[::-1] if self.target.transposed and self.source.kind not in KINDS else shape

    def info(self, name: str) -> TensorInfo:
        made = self.source.kind in KINDS or self.target.shift or self.target.undo is not None
        kind = "F32" if made else self.source.kind
        start, nbytes = self.file.span(self.name, self.target.expert)
        if self.target.rows is not None:
            nbytes = nbytes // self.source.shape[0] * self.shape[0]
        return TensorInfo(name, kind, self.shape, start, nbytes)

    @property
    def in_blocks(self) -> bool:
        """Whether the weight can stay in blocks: its values are unchanged and permutations only move whole blocks."""
        target, blocks = self.target, self.source.kind in KINDS and len(self.shape) == 2
        return (
            blocks
            and not target.plain
            and not target.shift
            and target.undo is None
            and self._columns(blocks=True) is not None
        )

    def stored(self) -> np.ndarray:
        """Return values or blocks with rows in checkpoint order, and columns too if only whole blocks move."""
        rows = self.file.read(self.name, self.target.expert)
        if self.target.rows is not None:
            rows = rows[slice(*self.target.rows)]
        rows = rows if self.target.order is None else rows[self.target.order(rows.shape[0])]
        return rows if self.target.columns is None or not self.in_blocks else rows[:, self._columns(blocks=True)]

    def _columns(self, *, blocks: bool) -> np.ndarray | slice | None:
        """Return the order of the columns, or of blocks of them; None if blocks would have to be split."""
        if self.target.columns is None:
            return slice(None)
        places = self.target.columns(self.source.shape[-1])
        if not blocks:
            return places
        size = KINDS[self.source.kind].elements
        firsts = places.reshape(-1, size)[:, :1]
        whole = (firsts % size == 0).all() and (places.reshape(-1, size) == firsts + np.arange(size)).all()
        return firsts[:, 0] // size if whole else None

    def read(self) -> np.ndarray:
        rows = self.stored()
        if self.source.kind in KINDS:
            values = numbers(self.source.kind, rows.reshape(-1, *rows.shape[-2:]))
            rows = values.reshape(*rows.shape[:-2], -1)
        if self.target.columns is not None and not self.in_blocks:
            rows = rows[:, self._columns(blocks=False)]
        if self.target.shift:
            rows = rows.astype(np.float32) + np.float32(self.target.shift)
        if self.target.undo is not None:
            rows = self._undone(rows)
        return rows.T if self.target.transposed else rows.reshape(self.shape)

    def _undone(self, rows: np.ndarray) -> np.ndarray:
        assert self.target.undo is not None
        try:
            return self.target.undo(rows)
        except ValueError as error:
            raise CheckpointError(f"tensor {quoted(self.name)} of {self.file.path} has {error}") from None

    def expect(self, part: np.ndarray) -> None:
        if self._is_view:
            self.file.expect(self.name, part)

    def release(self) -> None:
        self.file.release(self.name, self.target.expert)

    @property
    def _is_view(self) -> bool:
        target = self.target
        changes = (target.order, target.expert, target.rows, target.columns, target.undo)
        moved = any(each is not None for each in changes)
        return not target.shift and not moved and self.source.kind not in KINDS


def stored_weight(plain: Plain) -> StoredWeight:
    def read(part: str) -> np.ndarray:
        array = stored_part(plain, part)
        plain.release()
        return array

    return StoredWeight(plain.shape, layout_of(plain.source.kind), read, plain.info(plain.name).nbytes)


def stored_part(plain: Plain, part: str) -> np.ndarray:
    """Return an array of the layout of a matrix, or of a stack of them, in blocks: [..., out, ...]."""
    blocks = plain.stored()
    try:
        array = part_of(plain.source.kind, part, blocks.reshape(-1, *blocks.shape[-2:]))
    except CheckpointError as error:
        raise CheckpointError(f"tensor {quoted(plain.name)} of {plain.file.path} has {error}") from None
    return array.reshape(*plain.shape[:-1], *array.shape[1:])
