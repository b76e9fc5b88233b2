"""Growable array that appends at its end and drops from its start. No jax."""

from __future__ import annotations

import numpy as np


class Buffer:
    """Numbers at indices ``start`` to ``end``; indices stay the same while older numbers are dropped."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self.start = self.end = 0
        self._offset = 0  # array position of index `start`
        self._array = np.empty(64, dtype)

    def __len__(self) -> int:
        return self.end - self.start

    def __getitem__(self, place: int) -> int:
        return int(self._array[place - self.start + self._offset])

    def view(self) -> np.ndarray:
        """Return a view of all numbers, valid until the next `extend`."""
        return self._array[self._offset : self._offset + len(self)]

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers at ``places``, which must be in the buffer."""
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
        """Drop the ``count`` oldest numbers."""
        self.start += count
        self._offset += count
