"""`jaxinfer version`: versions of jaxinfer and its dependencies."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from collections.abc import Sequence

from jaxinfer.cli.parser import Parser
from jaxinfer.version import __version__

_OTHERS = ("jax", "jaxlib", "flax", "grpcio", "jax-cuda12-plugin", "jax-cuda13-plugin")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags: only those shared by all commands."""
    args: argparse.Namespace = Parser("jaxinfer version", "Versions of jaxinfer and its dependencies.").parse_args(argv)
    return args


def run(args: argparse.Namespace) -> int:
    """Print the versions without importing the packages."""
    del args
    print(f"jaxinfer {__version__}")
    print(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in _OTHERS:
        if (found := _version(name)) is not None:
            print(f"{name} {found}")
    return 0


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
