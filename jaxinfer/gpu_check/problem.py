"""What a problem of section parity is: operands with poison, the exact result, the paths that must give it."""

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
    """Operands of one call, on the host, by the names of the op's arguments.

    Attributes:
        arrays: arrays, and trees of them.
        options: what is no array.
        exact: the result in float64.
        modelled: the same with the kernel's own roundings before the last; None: it has none that are modelled.
        counts: which numbers of the rows' result mean something; None: all.
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
        paths: module and function of each path, imported when it runs: one that is not there is reported.
        build: the operands; ``quick``: tiny ones.
        by_row: the arguments with an axis of rows, the first.
        bound: of the relative error beyond rounding, see `measure.deviation`.
        tiles: what an interpreted kernel is given, so that it has little to do; None: what the kernel takes by itself.
        result: makes the pair out of what the op returns.
        call: makes a function of `Operands` out of a path.
        built_for: the first and the last compute capability that the kernel is for.
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
        """Raises ImportError or AttributeError where it is not there."""
        return self.call(named(self.paths[path]))

    def refusal(self, path: str, capability: Capability | None) -> str | None:
        """Why a path is not for a GPU of this compute capability (None: it is no GPU); None: it is."""
        first, last = self.built_for
        if path != MOSAIC or capability is None or first <= capability <= last:
            return None
        least, most, this = (".".join(map(str, each)) for each in (first, last, capability))
        return f"the kernel is for GPUs of compute capability {least} to {most}, this is one of {this}"

    def interpreted_tiles(self) -> dict[str, Any]:
        """Arguments of the kernel beside its operands where it is interpreted."""
        if self.tiles is None:
            return {}
        return {"tiles": named(self.paths[MOSAIC].split(":")[0] + ":Tiles")(**self.tiles)}


def named(name: str) -> Any:
    """Import "module:attribute" when it is needed: an op that is broken does not stop the others."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)
