"""Checkpoint tensors that a GGUF file splits: MLA up-projections, gate and up of experts, recurrent projections."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxinfer.quant.ggml import KINDS
from jaxinfer.weights.gguf.blocks import layout_of
from jaxinfer.weights.gguf.tensor_names import Join
from jaxinfer.weights.gguf.tensors import Plain, stored_part
from jaxinfer.weights.quantized import StoredWeight
from jaxinfer.weights.safetensors.reader import TensorInfo


class Latest:
    """Cache of the last array: parameters take the experts of a stack one by one, each time by the stack's name."""

    def __init__(self) -> None:
        self._name, self._array = "", np.empty(0)

    def get(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        if name != self._name:
            self._name, self._array = "", np.empty(0)  # free the old array before making the new one
            self._array = make()
            self._name = name
        return self._array


@dataclasses.dataclass(frozen=True)
class Joined:
    """A tensor assembled in memory from several tensors of a file.

    This class makes stacks [experts, in, out] of parts [experts, out, in], and biases [experts, out] of biases.
    """

    join: Join
    parts: tuple[Plain, ...]
    latest: Latest

    rank = 3  # of parts that can stay in blocks

    @property
    def fits(self) -> bool:
        return len({part.shape for part in self.parts}) == 1 and len(self.parts[0].shape) in (2, 3)

    @property
    def in_blocks(self) -> bool:
        """Whether the result can stay in blocks: all parts have one block type, and are matrices or stacks of them."""
        kinds = {part.source.kind for part in self.parts}
        return len(kinds) == 1 and kinds <= KINDS.keys() and len(self.parts[0].shape) == self.rank

    def info(self, name: str) -> TensorInfo:
        kinds = {part.info(part.name).dtype for part in self.parts}
        kind = kinds.pop() if len(kinds) == 1 else "F32"
        return TensorInfo(name, kind, self._shape_of_values, self.parts[0].source.start, self._nbytes)

    def read(self) -> np.ndarray:
        return self.latest.get(self.join.name, lambda: self._values([part.read() for part in self.parts]))

    def stored(self) -> StoredWeight:
        """Return the tensor as a block-quantised weight."""

        def read(part: str) -> np.ndarray:
            name = f"{self.join.name}#{part}"
            array = self.latest.get(name, lambda: self._joined([stored_part(each, part) for each in self.parts]))
            self.release()
            return array

        return StoredWeight(self._shape, layout_of(self.parts[0].source.kind), read, self._nbytes)

    def expect(self, part: np.ndarray) -> None:
        del part  # already in memory

    def release(self) -> None:
        for part in self.parts:
            part.release()

    @property
    def _nbytes(self) -> int:
        return sum(part.source.nbytes for part in self.parts)

    @property
    def _shape(self) -> tuple[int, ...]:
        """Shape with outputs before inputs."""
        experts, out, *inputs = self.parts[0].shape
        return (experts, len(self.parts) * out, *inputs)

    @property
    def _shape_of_values(self) -> tuple[int, ...]:
        experts, *rest = self._shape
        return (experts, *reversed(rest))

    def _values(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        joined = self._joined(arrays)
        return joined.swapaxes(1, 2) if joined.ndim == 3 else joined

    def _joined(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return values or blocks of all parts, outputs before inputs."""
        if len(arrays) == 1:
            return arrays[0]
        if not self.join.interleaved:
            return np.concatenate(arrays, axis=1)
        stacked = np.stack(arrays, axis=2)
        return stacked.reshape(stacked.shape[0], -1, *stacked.shape[3:])


class Rows(Joined):
    """A matrix [out, in] whose rows are in several tensors, in another order."""

    rank = 2

    @property
    def fits(self) -> bool:
        shapes = [part.shape for part in self.parts]
        return {len(shape) for shape in shapes} == {2} and len({shape[1] for shape in shapes}) == 1

    @property
    def _shape(self) -> tuple[int, ...]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def _shape_of_values(self) -> tuple[int, ...]:
        return self._shape

    def _values(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return self._joined(arrays)

    def _joined(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        assert self.join.order is not None
        return np.concatenate(arrays)[self.join.order(self._shape[0])]


class Latents(Rows):
    """``kv_b_proj`` [heads * (nope + value), rank], joined from [heads, rank, nope] and [heads, value, rank]."""

    @property
    def fits(self) -> bool:
        keys, values = (part.shape for part in self.parts)
        return len(keys) == len(values) == 3 and keys[0] == values[0] and keys[1] == values[2]

    @property
    def _shape(self) -> tuple[int, ...]:
        (heads, rank, nope), (_, value, _) = (part.shape for part in self.parts)
        return heads * (nope + value), rank

    def _joined(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        keys, values = arrays
        joined = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
        return joined.reshape(-1, joined.shape[-1])


def joined(join: Join, parts: tuple[Plain, ...], latest: Latest) -> Joined:
    if join.latents:
        return Latents(join, parts, latest)
    return (Joined if join.order is None else Rows)(join, parts, latest)
