"""The ops of this package, found by their folders, and their configurations."""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Iterable, Sequence

import pallas_kernels
from pallas_kernels.check.configuration import Configuration

# Names of an op's kernels in its folder: one module or package, or one package per GPU generation.
KERNELS = ("mosaic.py", "mosaic", "hopper", "ampere")
PACKAGE = pathlib.Path(pallas_kernels.__file__).parent


def op_folders(package: pathlib.Path = PACKAGE) -> list[pathlib.Path]:
    """Return the folders with a Mosaic kernel."""
    return sorted(path for path in package.iterdir() if any((path / kernel).exists() for kernel in KERNELS))


def forgotten(package: pathlib.Path = PACKAGE) -> list[str]:
    """Return the ops with a Mosaic kernel and no configurations, whose spills no check would find."""
    return [folder.name for folder in op_folders(package) if not _files(folder.name, package)]


def configurations(prefixes: Iterable[str] = ("",)) -> list[Configuration]:
    """Return the configurations of ops whose names begin with a prefix; import only their modules.

    Raises:
        ValueError: an op is not named after its folder, or two of its configurations have the same name.
    """
    prefixes = tuple(prefixes)
    found: list[Configuration] = []
    for folder in op_folders():
        wanted = any(folder.name.startswith(prefix.split(".")[0]) for prefix in prefixes)
        if wanted:
            shipped = list(dict.fromkeys(one for path in _files(folder.name) for one in _listed(path.stem)))
            _check_names(folder.name, [(one.op, one.name) for one in shipped])
            found += shipped
    return [one for one in found if one.op.startswith(prefixes)]


def _files(op: str, package: pathlib.Path = PACKAGE) -> list[pathlib.Path]:
    """Return ``<op>.py`` and, for an op with many kernels, ``<op>_<kernel>.py``."""
    return sorted((package / "check/configurations").glob(f"{op}*.py"))


def _listed(name: str) -> tuple[Configuration, ...]:
    module = importlib.import_module(f"pallas_kernels.check.configurations.{name}")
    listed: tuple[Configuration, ...] = module.CONFIGURATIONS
    return listed


def _check_names(folder: str, names: Sequence[tuple[str, str]]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{folder}: configurations of the same name: {twice}")
    if foreign := sorted({op for op, _ in names if op.split(".")[0] != folder}):
        raise ValueError(f"{folder}: the names of its ops must begin with it: {foreign}")
