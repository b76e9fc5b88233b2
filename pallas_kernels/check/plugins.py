"""Plugins to compile for a GPU without one: JAX's CUDA plugin and, to count instructions, nvdisasm.

They belong into a folder of their own: beside JAX, the plugin would make it look for a GPU at every start.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator

PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
ROOT = pathlib.Path(__file__).resolve().parents[2]
DEFAULT_FOLDER = ROOT / "build" / "gpu_plugins"  # where `make check-kernels` puts them


class PluginsMissing(Exception):
    """The plugin is not there, or of another version than JAX. The message says how to install it."""


def require_plugins(folder: pathlib.Path | None) -> None:
    """Check that the plugin is in ``folder``, or where Python looks for modules.

    Raises:
        PluginsMissing: one sentence and two commands.
    """
    wanted = importlib.metadata.version("jaxlib")
    found = {name: _version(name, folder) for name in PACKAGES}
    if wrong := {name: version for name, version in found.items() if version != wanted}:
        state = ", ".join(f"{name} is {version or 'missing'}" for name, version in wrong.items())
        into = folder or DEFAULT_FOLDER
        commands = "\n".join(f"    pip install --no-deps --target {into} {name}=={wanted}" for name in PACKAGES)
        raise PluginsMissing(f"compiling for a GPU needs JAX's CUDA plugin in version {wanted}: {state}\n{commands}")


def default_folder() -> pathlib.Path | None:
    """The folder of `make check-kernels`, if that has run."""
    return DEFAULT_FOLDER if DEFAULT_FOLDER.is_dir() else None


def environment(folder: pathlib.Path | None) -> dict[str, str]:
    """The environment of a process that compiles: JAX stays on the CPU, and nothing is tried out on a GPU."""
    path = [str(ROOT), *([str(folder)] if folder else []), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    }


def disassembler(folder: pathlib.Path | None) -> pathlib.Path | None:
    """Find nvdisasm in the folder, a package of NVIDIA's, or PATH."""
    for place in _places(folder):
        if (path := pathlib.Path(place, "nvidia", "cu13", "bin", "nvdisasm")).is_file():
            return path
    found = shutil.which("nvdisasm")
    return pathlib.Path(found) if found else None


def _places(folder: pathlib.Path | None) -> Iterator[str]:
    if folder is not None:
        yield str(folder)
    yield from sys.path


def _version(name: str, folder: pathlib.Path | None) -> str | None:
    for found in importlib.metadata.distributions(name=name, path=list(_places(folder))):
        return found.version
    return None
