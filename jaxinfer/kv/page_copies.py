"""Page moves that a step makes before it computes. No jax.

A page of a sequence has one physical page in each cache group; -1 where it slid out of a group's window.
"""

from __future__ import annotations

from typing import NamedTuple

Pages = tuple[int, ...]


class Export(NamedTuple):
    """Device pages to copy to a page in host memory."""

    source: Pages
    host: int


class Copy(NamedTuple):
    """Device pages to copy to other device pages."""

    source: Pages
    target: Pages


class Import(NamedTuple):
    """A page in host memory to copy to device pages."""

    host: int
    target: Pages
