"""Declarations of kernels at the shapes that matter: one module per op, ``pallas_kernels/<op>/arg_specs.py``.

Such a module has records of shapes (`Spec`) and:

- ``SHIPPED``: the specs that `pallas_kernels.check` compiles.
- ``trial_case(draw, *operands, **options)``: operands of a recorded launch, for `pallas_kernels.trial`.
- ``TUNED``, if the kernel has tiles: the `Tunable` declarations that `pallas_kernels.tune` searches.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import pathlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.tiles import Key

HOPPER, H200, AMPERE, ADA = "sm_90a", "sm_90a-h200", "sm_80", "sm_89"
EVERYWHERE = (HOPPER, AMPERE, ADA)
PACKAGE = pathlib.Path(__file__).parent
# Names of an op's kernels in its folder: one module or package, or one package per GPU generation.
KERNELS = ("mosaic.py", "mosaic", "hopper", "ampere")
MODULE = "arg_specs"
SHORT = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int4": "int4",
    "int8": "int8",
    "uint8": "powers",
    "float8_e4m3fn": "fp8",
}


class Spec(abc.ABC):
    """A kernel at one shape: a frozen dataclass of sizes, names of dtypes, and flags that are 0 or 1."""

    @property
    @abc.abstractmethod
    def op(self) -> str:
        """Name of the op, ``paged_attention.decode`` for example, which begins with its folder."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Distinguishes the shapes of an op: ``page64-dim128-group4-bf16`` for example."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Targets it ships for. An H200 runs an H100's machine code; the choice of its heuristics may differ."""
        return (HOPPER,)

    @property
    def donated(self) -> tuple[int, ...]:
        """Indices of the donated arguments."""
        return ()

    @property
    @abc.abstractmethod
    def kernel(self) -> Callable[..., Any]:
        """The function that `jax.jit` compiles."""

    @abc.abstractmethod
    def arguments(self) -> tuple[Any, ...]:
        """Return the shapes of the kernel's arguments (trees of `jax.ShapeDtypeStruct`)."""


def shaped(*shape: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """Return an argument that has only a shape and a dtype."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    """Return an int32 argument that has only a shape."""
    return shaped(*shape, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A kernel at one shape, to be tuned; nothing is allocated before ``operands`` is called.

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
        shapes: specs of one type, the most informative first. The first one of several with the same options decides
            about ``bits`` for all of them.
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
        known = {name: x for name, x in dataclasses.asdict(default).items() if isinstance(x, int | float | str)}
        given = dict(part.partition("=")[::2] for part in text.split(","))
        if unknown := sorted(given.keys() - known.keys()):
            raise ValueError(f"{self.kernel} has no {', '.join(unknown)}; its shapes have {', '.join(known)}")
        return dataclasses.replace(default, **{name: type(known[name])(value) for name, value in given.items()})


def op_folders(package: pathlib.Path = PACKAGE) -> list[pathlib.Path]:
    """Return the folders with a Mosaic kernel."""
    return sorted(path for path in package.iterdir() if any((path / kernel).exists() for kernel in KERNELS))


def forgotten(package: pathlib.Path = PACKAGE) -> list[str]:
    """Return the ops with a Mosaic kernel and no specs, whose faults no check would find."""
    return [folder.name for folder in op_folders(package) if not (folder / f"{MODULE}.py").exists()]


def specs_of(op: str) -> ModuleType:
    """Import the specs of an op, which is named by its folder and possibly its function.

    Raises:
        ModuleNotFoundError: it has none.
    """
    return importlib.import_module(f"pallas_kernels.{op.split('.')[0]}.{MODULE}")
