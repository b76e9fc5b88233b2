"""Launches of Mosaic kernels: which ones a program makes, and which ops a GPU has failed.

A program that is traced within `recording` notes each op that takes its kernel, with the shapes of its operands and
the XLA path of the same op: `pallas_kernels.trial` runs both on a GPU and compares. An op that fails is `exclude`d:
from then on "auto" is the XLA path for it in this process.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax


class Launch(NamedTuple):
    """One op at one shape, by its kernel.

    Attributes:
        op: the op's folder, and its function where it has several: "paged_attention.decode" for example.
        kernel: the kernel's own function.
        plain: the XLA path's, which takes the same operands.
        operands: positional ones, a tree with a `jax.ShapeDtypeStruct` in the place of each array.
        options: those by keyword.
    """

    op: str
    kernel: Callable[..., Any]
    plain: Callable[..., Any]
    operands: tuple[Any, ...]
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Tells launches apart by what they do; the same in every process."""
        name = f"{self.kernel.__module__}.{self.kernel.__qualname__}"
        return f"{self.op} {name} {self.operands} {sorted(self.options.items())}"

    def __str__(self) -> str:
        shapes = [
            f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
            for leaf in jax.tree.leaves((self.operands, self.options))
            if isinstance(leaf, jax.ShapeDtypeStruct)
        ]
        return f"{self.op} of {' '.join(shapes)}"


_RECORD: contextvars.ContextVar[dict[str, Launch] | None] = contextvars.ContextVar("launches", default=None)
_EXCLUDED: dict[str, str] = {}


@contextlib.contextmanager
def recording() -> Iterator[dict[str, Launch]]:
    """Collect the launches of programs that are traced meanwhile, by their keys."""
    found: dict[str, Launch] = {}
    token = _RECORD.set(found)
    try:
        yield found
    finally:
        _RECORD.reset(token)


def note(op: str, kernel: Callable[..., Any], plain: Callable[..., Any], *operands: Any, **options: Any) -> None:
    """Note a launch, where they are recorded. ``kernel`` and ``plain`` take these operands and options."""
    found = _RECORD.get()
    if found is not None:
        one = Launch(op, kernel, plain, *jax.tree.map(_shape, (operands, options)))
        found.setdefault(one.key, one)


def noted(op: str, path: str, kernel: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """``plain``, or with the path "mosaic" the kernel, whose launch is noted."""
    if path != "mosaic":
        return plain

    def run(*operands: Any, **options: Any) -> Any:
        note(op, kernel, plain, *operands, **options)
        return kernel(*operands, **options)

    return run


def exclude(op: str, why: str) -> None:
    """Let "auto" be the XLA path for an op from now on. Programs that are traced already keep their kernels."""
    _EXCLUDED[op] = why


def excluded(op: str) -> str | None:
    """Why an op's kernel is not to be used on this GPU, in one sentence; None: it is."""
    return _EXCLUDED.get(op)


def readmit() -> None:
    """Forget all that was excluded."""
    _EXCLUDED.clear()


def _shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else leaf
