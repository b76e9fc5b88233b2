"""Rows of a name map: how an array of a trainer holds one tensor of a Hugging Face checkpoint, or several."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

STACK = "S"
"""Letter of the axis along which an array holds several tensors."""
VOCABULARY = "V"
"""Letter of the axis that has an entry for each token."""


@dataclasses.dataclass(frozen=True)
class View:
    """Position of a tensor within an array of a trainer.

    Attributes:
        form: a letter for each axis of the array.
        order: the letters in the order of the tensor, which may merge neighbours.
        shape: shape of the tensor.
        vocab: size of the vocabulary in an array that may have padding after it (0: no padding).
        scale, offset: the tensor is the array times ``scale`` plus ``offset``, computed in float32.
        interleaved: the last axis of the array has the two halves of a rotated head as pairs.
    """

    form: str
    order: str
    shape: tuple[int, ...]
    vocab: int = 0
    scale: float = 1.0
    offset: float = 0.0
    interleaved: bool = False

    def tensor(self, array: Any, index: int) -> Any:
        """Return the tensor at ``index`` of the stack, for a numpy or JAX array; a view of it where there is one."""
        letters = self.form.replace(STACK, "")
        if STACK in self.form:
            array = array[_at(self.form, STACK, index)]
        if self.vocab:
            array = array[_at(letters, VOCABULARY, slice(self.vocab))]
        if self.interleaved:
            pairs = array.reshape(*array.shape[:-1], array.shape[-1] // 2, 2)
            array = pairs.swapaxes(-1, -2).reshape(array.shape)
        if self.scale != 1.0 or self.offset:
            scaled = array.astype(np.float32) * np.float32(self.scale) + np.float32(self.offset)
            array = scaled.astype(array.dtype)
        return array.transpose([letters.index(letter) for letter in self.order]).reshape(self.shape)


def _at(letters: str, letter: str, index: int | slice) -> tuple[int | slice, ...]:
    return (slice(None),) * letters.index(letter) + (index,)


@dataclasses.dataclass(frozen=True)
class Row:
    """An array of a trainer.

    Attributes:
        tensors: the Hugging Face tensors that it holds: one, or one for each index of its stacked axis.
        shape: shape of the array.
        view: how to read a tensor from it; None: it is the tensor.
    """

    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    view: View | None = None

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether an array of this shape can be read; that of a padded vocabulary may be longer."""
        if self.view is None or not self.view.vocab or len(shape) != len(self.shape):
            return shape == self.shape
        axis = self.view.form.index(VOCABULARY)
        return shape[axis] >= self.view.vocab and shape == (*self.shape[:axis], shape[axis], *self.shape[axis + 1 :])


@dataclasses.dataclass(frozen=True)
class Template:
    """Name and axes of an array that holds a tensor; the other attributes are those of its `View`.

    Attributes:
        name: name of the array, within its layer if it belongs to one.
        order: "" for that of ``form``.
        padded: the array may have padding after the vocabulary.
    """

    name: str
    form: str
    order: str = ""
    scale: float = 1.0
    offset: float = 0.0
    interleaved: bool = False
    padded: bool = False

    @property
    def axes(self) -> str:
        """Letters of the tensor, in its order."""
        return self.order or self.form.replace(STACK, "")

    def row(self, tensors: tuple[str, ...], shape: tuple[int, ...], sizes: Mapping[str, int], axis: int | None) -> Row:
        """Return the row of an array.

        Args:
            tensors, shape: names of the tensors that it holds, and the shape of one.
            sizes: the size of an axis, by its letter.
            axis: position of the axis of layers in the array (None: it has none).
        """
        form = self.form if axis is None else f"{self.form[:axis]}{STACK}{self.form[axis:]}"
        whole = tuple({**sizes, STACK: len(tensors)}[letter] for letter in form)
        vocab = sizes[VOCABULARY] if self.padded else 0
        view = View(form, self.axes, shape, vocab, self.scale, self.offset, self.interleaved)
        return Row(tensors, whole, view)
