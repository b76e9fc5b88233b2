"""Raw tensors of a quantised checkpoint, read by format adapters with every shape and dtype checked."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import ml_dtypes
import numpy as np

from jaxinfer.quant.layouts import Layout
from jaxinfer.weights.errors import CheckpointError, quoted, shape_text
from jaxinfer.weights.quantized import StoredWeight
from jaxinfer.weights.safetensors.checkpoint import Tensors
from jaxinfer.weights.safetensors.reader import DTYPES, TensorInfo

FLOATS = ("F16", "BF16", "F32")
POWERS = np.dtype(ml_dtypes.float8_e8m0fnu)

Parts = Mapping[str, Callable[[], np.ndarray]]


class RawTensors:
    """A checkpoint from which format adapters take tensors.

    Attributes:
        taken: names of the tensors that make up stored weights; no parameter may read them.
    """

    def __init__(self, checkpoint: Tensors) -> None:
        self._checkpoint = checkpoint
        self.taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint.tensors

    def ending(self, *suffixes: str) -> list[str]:
        """Return all names with one of these suffixes."""
        return [name for name in self._checkpoint.tensors if name.endswith(suffixes)]

    def take(self, name: str, dtypes: Sequence[str], shape: Sequence[int | None]) -> TensorInfo:
        """Take a tensor of one of these dtypes and of this shape (None: any extent except 0), and mark it as taken.

        Raises:
            CheckpointError: it is missing, or has another dtype or shape.
        """
        info = self._checkpoint.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self._checkpoint.folder} lacks tensor {quoted(name)} of a quantised weight")
        if info.dtype not in dtypes:
            raise self.wrong(name, f"is stored as {info.dtype} where its format has {' or '.join(dtypes)}")
        fits = all(have > 0 if want is None else have == want for have, want in zip(info.shape, shape, strict=False))
        if len(info.shape) != len(shape) or not fits:
            raise self.wrong(name, f"has shape {shape_text(info.shape)} where its format asks {shape_text(shape)}")
        self.taken.add(name)
        return info

    def take_one(self, name: str, dtypes: Sequence[str]) -> TensorInfo:
        """Take a tensor with a single value, ``[]`` or ``[1]``."""
        return self.take(name, dtypes, (1,) if len(self.shape(name)) == 1 else ())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; () if it is absent."""
        info = self._checkpoint.tensors.get(name)
        return () if info is None else info.shape

    def modules(self, suffix: str) -> list[str]:
        """Return the names of the tensors with a suffix, without it."""
        return [name.removesuffix(suffix) for name in self.ending(suffix)]

    def drop(self, *suffixes: str) -> None:
        """Mark unused tensors with one of these suffixes as taken."""
        self.taken.update(self.ending(*suffixes))

    def drop_one(self, name: str) -> None:
        """Mark an unused tensor as taken; it may be absent."""
        if name in self:
            self.taken.add(name)

    def view(self, name: str) -> np.ndarray:
        """Return a tensor as a read-only view of the file."""
        return self._checkpoint.read(name)

    def read(self, name: str, change: Callable[[np.ndarray], np.ndarray] = np.array) -> np.ndarray:
        """Read a tensor, apply ``change``, which copies it to a new array, and release the file's memory."""
        result = change(self._checkpoint.read(name))
        self._checkpoint.release(name)
        return result

    def scales(self, name: str, change: Callable[[np.ndarray], np.ndarray] = np.array) -> np.ndarray:
        """Read scales as `read` does; raise CheckpointError if one is infinite or NaN."""
        result = self.read(name, change)
        if not np.isfinite(result.astype(np.float32)).all():
            raise self.wrong(name, "holds scales that are NaN or infinite")
        return result

    def one(self, name: str, positive: bool = False) -> np.ndarray:
        """Return a single finite value as float32 ``[]``."""
        value = self.scales(name, lambda tensor: np.array(tensor.reshape(()), np.float32))
        if positive and not value > 0:
            raise self.wrong(name, f"is {value}, not a positive number")
        return value

    def wrong(self, name: str, what: str) -> CheckpointError:
        """Return the error for a tensor; ``what`` completes the message."""
        return CheckpointError(f"tensor {quoted(name)} of {self._checkpoint.folder} {what}")

    def stored(self, shape: Sequence[int], layout: Layout, parts: Parts, names: Sequence[str]) -> StoredWeight:
        """Return a weight that ``parts`` reads from the tensors ``names``."""
        nbytes = sum(self._checkpoint.tensors[name].nbytes for name in names)
        digest = _digest([parts[name]() for name in layout.input_parts(shape[-1])])
        return StoredWeight(tuple(shape), layout, lambda name: parts[name](), nbytes, digest)


def dtype_name(info: TensorInfo) -> str:
    """Return the name of a tensor's dtype in numpy and ml_dtypes."""
    return DTYPES[info.dtype].name


def pieces(whole: int, size: int) -> int:
    """Return the number of chunks of a size, the last of which may be smaller."""
    return math.ceil(whole / size)


def spread(scales: np.ndarray, block: tuple[int, int], shape: tuple[int, int], group: int) -> np.ndarray:
    """Expand block scales ``[out / rows, in / columns]`` to one for each row and ``group`` inputs."""
    rows = np.arange(shape[0]) // block[0]
    columns = np.arange(0, shape[1], group) // block[1]
    return scales[rows[:, None], columns]


def _digest(arrays: Sequence[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest() if arrays else ""
