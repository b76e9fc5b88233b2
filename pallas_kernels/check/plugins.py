"""Plugins to compile for a GPU without one: JAX's CUDA plugin and, to count instructions, nvdisasm.

They must be in a separate folder: installed with JAX, the plugin would make it look for a GPU at every start.
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
DEFAULT_FOLDER = ROOT / "build" / "gpu_plugins"  # folder that `make check-kernels` installs into


class PluginsMissing(Exception):
    """The plugin is missing, or its version differs from JAX's. The message gives the commands that install it."""


def require_plugins(folder: pathlib.Path | None) -> None:
    """Check that the plugin is in ``folder``, or on Python's module path.

    Raises:
        PluginsMissing: the plugin is missing or has another version; the message has the install commands.
    """
    wanted = importlib.metadata.version("jaxlib")
    found = {name: _version(name, folder) for name in PACKAGES}
    if wrong := {name: version for name, version in found.items() if version != wanted}:
        state = ", ".join(f"{name} is {version or 'missing'}" for name, version in wrong.items())
        into = folder or DEFAULT_FOLDER
        commands = "\n".join(f"    pip install --no-deps --target {into} {name}=={wanted}" for name in PACKAGES)
        raise PluginsMissing(f"compiling for a GPU needs JAX's CUDA plugin in version {wanted}: {state}\n{commands}")


def default_folder() -> pathlib.Path | None:
    """Return the folder of `make check-kernels`, if that has run."""
    return DEFAULT_FOLDER if DEFAULT_FOLDER.is_dir() else None


def environment(folder: pathlib.Path | None) -> dict[str, str]:
    """Return the environment of a compiling process: JAX stays on the CPU, and XLA does not autotune on a GPU."""
    path = [str(ROOT), *([str(folder)] if folder else []), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    }


def disassembler(folder: pathlib.Path | None) -> pathlib.Path | None:
    """Find nvdisasm in the folder, in an NVIDIA package, or on PATH."""
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
