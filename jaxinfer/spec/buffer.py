"""An array that grows at its end and is forgotten from its start. No jax."""

from __future__ import annotations

import numpy as np


class Buffer:
    """Numbers at places ``start`` to ``end``, which stay the same while older ones are forgotten."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self.start = self.end = 0
        self._offset = 0  # of place `start` in the array
        self._array = np.empty(64, dtype)

    def __len__(self) -> int:
        return self.end - self.start

    def __getitem__(self, place: int) -> int:
        return int(self._array[place - self.start + self._offset])

    def view(self) -> np.ndarray:
        """All of it, good until the next `extend`."""
        return self._array[self._offset : self._offset + len(self)]

    def at(self, places: np.ndarray) -> np.ndarray:
        """The numbers at places that are there."""
        return self._array[places - (self.start - self._offset)]

    def extend(self, numbers: np.ndarray) -> None:
        """Append numbers. Amortised O(1) each."""
        count = len(self)
        if self._offset + count + len(numbers) > len(self._array):
            grown = np.empty(max(64, 2 * (count + len(numbers))), self._array.dtype)
            grown[:count] = self.view()
            self._array, self._offset = grown, 0
        self._array[self._offset + count : self._offset + count + len(numbers)] = numbers
        self.end += len(numbers)

    def forget(self, count: int) -> None:
        """Forget the ``count`` oldest numbers."""
        self.start += count
        self._offset += count
