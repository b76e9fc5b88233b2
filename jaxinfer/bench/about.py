"""What a report says about its run: the requests, and the versions."""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

from jaxinfer.bench.datasets import DATASETS, DEFAULT_LENGTHS, Lengths
from jaxinfer.version import __version__


def requests_line(options: argparse.Namespace) -> str:
    """Return the data set, the lengths, the temperature and the seed."""
    dataset = DATASETS[options.dataset]
    parts = [options.dataset if options.dataset_path is None else f"{options.dataset} ({options.dataset_path.name})"]
    if options.dataset in ("shared-prefix", "sonnet"):
        parts.append(f"prefixes of {options.prefix_len}")
    if dataset.lengths_given:
        parts.append(f"{_tokens(options.input_len)} tokens in, {_tokens(options.output_len or DEFAULT_LENGTHS)} out")
    return ", ".join((*parts, f"temperature {options.temperature:g}", f"seed {options.seed}"))


def _tokens(lengths: Lengths) -> str:
    return str(lengths.low) if lengths.low == lengths.high else f"{lengths.low} to {lengths.high}"


def date_line() -> str:
    """Return the current time, in UTC, and the version of this package."""
    now = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return f"{now} UTC, jaxinfer.bench {importlib.metadata.version('jaxinfer')}"


def versions(packages: Sequence[str]) -> dict[str, Any]:
    """Return the date, and the versions of Python, the system, jaxinfer and ``packages``."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {
            "python": sys.version.split()[0],
            "system": platform.platform(),
            "jaxinfer": __version__,  # of the source, which need not be installed
            **{name: importlib.metadata.version(name) for name in packages},
        },
    }


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options as values of JSON."""
    return {name: str(value) if isinstance(value, pathlib.Path) else value for name, value in vars(options).items()}
