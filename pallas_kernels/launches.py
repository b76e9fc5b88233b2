"""Launches of Mosaic kernels: which ones a program makes, and which ops failed on a GPU.

A program that is traced within `recording` records each op that takes its kernel, with the shapes of its operands and
the XLA path of the same op: `pallas_kernels.trial` runs both on a GPU and compares. An op that fails is `exclude`d:
from then on "auto" means the XLA path for it in this process.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax


class Launch(NamedTuple):
    """A kernel launch: an op at one shape.

    Attributes:
        op: the op's folder, and its function if it has several: "paged_attention.decode" for example.
        kernel: function of the kernel.
        plain: function of the XLA path, which takes the same operands.
        operands: positional ones, a tree with a `jax.ShapeDtypeStruct` in the place of each array.
        options: keyword arguments.
    """

    op: str
    kernel: Callable[..., Any]
    plain: Callable[..., Any]
    operands: tuple[Any, ...]
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """A key of what the launch does; the same in every process."""
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
    """Record a launch, if recording is on. ``kernel`` and ``plain`` take these operands and options."""
    found = _RECORD.get()
    if found is not None:
        one = Launch(op, kernel, plain, *jax.tree.map(_shape, (operands, options)))
        found.setdefault(one.key, one)


def noted(op: str, path: str, kernel: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``plain``, or for the path "mosaic" the kernel, which records its launch."""
    if path != "mosaic":
        return plain

    def run(*operands: Any, **options: Any) -> Any:
        note(op, kernel, plain, *operands, **options)
        return kernel(*operands, **options)

    return run


def exclude(op: str, why: str) -> None:
    """Make "auto" choose the XLA path for an op from now on. Programs that are already traced keep their kernels."""
    _EXCLUDED[op] = why


def excluded(op: str) -> str | None:
    """Return why an op's kernel is not to be used on this GPU, in one sentence; None: it may be used."""
    return _EXCLUDED.get(op)


def readmit() -> None:
    """Clear all exclusions."""
    _EXCLUDED.clear()


def _shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else leaf
