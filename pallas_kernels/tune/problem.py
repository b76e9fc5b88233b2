"""Declarations of kernels to be tuned: by op in `problems`; `kernels` lists them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallas_kernels.tiles import Key


@dataclasses.dataclass(frozen=True)
class Problem:
    """A kernel at one shape; nothing is allocated before ``operands`` is called.

    Attributes:
        key: the key by which the kernel looks tiles up.
        heuristic: the kernel's tiles without tuned ones.
        grid: the values to try of each field of its tiles.
        refusal: returns why the kernel does not support such tiles, or None.
        launch: called as ``launch(*operands, tiles=...)``.
        operands: operand sets that differ in at least one array each, so that no launch can be merged with another.
            Together they should not fit the GPU's cache if a model's would not.
    """

    key: Key
    heuristic: Any
    grid: Mapping[str, Sequence[int]]
    refusal: Callable[[Any], str | None]
    launch: Callable[..., Any]
    operands: Callable[[], list[tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class Tunable:
    """A kernel that can be tuned.

    Attributes:
        kernel: "paged_attention.decode" for example; begins with the op's folder.
        bits: fields of its tiles that change the last bits of a result.
        shapes: frozen dataclasses of one type, the most informative first. The first one of several with the same
            options decides about ``bits`` for all of them.
        problem: makes the problem of a shape, given the number of multiprocessors.
    """

    kernel: str
    bits: frozenset[str]
    shapes: tuple[Any, ...]
    problem: Callable[[Any, int], Problem]

    def shape(self, text: str) -> Any:
        """Parse a shape, the first one with other fields: ``rows=8,page=16``.

        Raises:
            ValueError: an unknown field, or a value of another type.
        """
        default = self.shapes[0]
        known = dataclasses.asdict(default)
        given = dict(part.partition("=")[::2] for part in text.split(","))
        if unknown := sorted(given.keys() - known.keys()):
            raise ValueError(f"{self.kernel} has no {', '.join(unknown)}; its shapes have {', '.join(known)}")
        return dataclasses.replace(default, **{name: type(known[name])(value) for name, value in given.items()})


def candidates(problem: Problem, fixed: Mapping[str, int]) -> list[Any]:
    """List the heuristic's tiles, then all of the grid that the kernel supports. Fields in ``fixed`` are set to it."""
    grid: list[dict[str, int]] = [{}]
    for name, values in problem.grid.items():
        grid = [{**one, name: value} for one in grid for value in ([fixed[name]] if name in fixed else values)]
    tiles = [_made(problem, fields) for fields in (dict(fixed), *grid)]
    return list(dict.fromkeys(one for one in tiles if one is not None))


def _made(problem: Problem, fields: Mapping[str, int]) -> Any | None:
    """Make tiles; None if they or the kernel reject these numbers."""
    try:
        tiles = dataclasses.replace(problem.heuristic, **fields)
    except ValueError:
        return None
    return None if problem.refusal(tiles) else tiles
