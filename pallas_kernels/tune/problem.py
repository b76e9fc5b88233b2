"""The candidates of a problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pallas_kernels.specs import Problem


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
