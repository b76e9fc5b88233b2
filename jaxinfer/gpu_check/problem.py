"""A problem of section parity: poisoned operands, the exact result, and the paths that must give it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.choice import ADA, AMPERE, HOPPER, Capability

BF16, FP16, INT8, FP8 = jnp.bfloat16, jnp.float16, jnp.int8, jnp.float8_e4m3fn
MOSAIC, XLA = "mosaic", "xla"
BELOW_HOPPER = (AMPERE, ADA)
UP_TO_HOPPER = (AMPERE, HOPPER)


class Operands(NamedTuple):
    """Operands of one call, on the host, by the argument names of the op.

    Attributes:
        arrays: arrays, and trees of them.
        options: arguments that are not arrays.
        exact: the result in float64.
        modelled: the float64 result with the kernel's own roundings before the last; None: no roundings are modelled.
        counts: mask of the rows' result without padding; None: all of it.
    """

    arrays: dict[str, Any]
    options: dict[str, Any]
    exact: tuple[Any, Any]
    counts: np.ndarray | None = None
    modelled: tuple[Any, Any] | None = None

    def expected(self, path: str) -> tuple[Any, Any]:
        return self.modelled if path == MOSAIC and self.modelled is not None else self.exact


class Problem(NamedTuple):
    """An op at one shape.

    Attributes:
        paths: module and function of each path, imported when it runs: a missing one is reported.
        build: builds the operands; ``quick``: tiny ones.
        by_row: the arguments whose first axis is rows.
        bound: bound on the relative error beyond rounding, see `measure.deviation`.
        tiles: small tiles for an interpreted kernel; None: the kernel's default.
        result: makes the pair from the return value of the op.
        call: makes a function of `Operands` from a path.
        built_for: the first and the last compute capability that the kernel supports.
    """

    op: str
    name: str
    paths: Mapping[str, str]
    build: Callable[[bool], Operands]
    by_row: tuple[str, ...]
    bound: float
    tiles: dict[str, int] | None = None
    result: Callable[[Any], tuple[Any, Any]] = lambda out: (out, None)
    call: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function
    built_for: tuple[Capability, Capability] = (HOPPER, HOPPER)

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"

    def function(self, path: str) -> Callable[..., Any]:
        """Import the function of a path; raise ImportError or AttributeError if it does not exist."""
        return self.call(named(self.paths[path]))

    def refusal(self, path: str, capability: Capability | None) -> str | None:
        """Return why a path does not support this compute capability (None: not a GPU), or None if it does."""
        first, last = self.built_for
        if path != MOSAIC or capability is None or first <= capability <= last:
            return None
        least, most, this = (".".join(map(str, each)) for each in (first, last, capability))
        return f"the kernel is for GPUs of compute capability {least} to {most}, this is one of {this}"

    def interpreted_tiles(self) -> dict[str, Any]:
        """Return the arguments of an interpreted kernel besides its operands."""
        if self.tiles is None:
            return {}
        return {"tiles": named(self.paths[MOSAIC].split(":")[0] + ":Tiles")(**self.tiles)}


def named(name: str) -> Any:
    """Import "module:attribute" on demand, so that a broken op does not stop the other ops."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)
