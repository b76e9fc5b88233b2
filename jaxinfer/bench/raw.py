"""Raw measurements as JSON lines: one of settings, one of each request, one of each run's figures."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from jaxinfer.bench.record import Record
from jaxinfer.bench.target import Served
from jaxinfer.version import __version__

FORMAT = 1


class RawFile:
    """Writer of the raw file, after each run and never during one."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def header(self, options: argparse.Namespace, served: Served, more: Mapping[str, Any]) -> None:
        settings = {name: _plain(value) for name, value in vars(options).items()}
        self._line("header", {"format": FORMAT, "settings": settings, "server": vars(served), **_versions(), **more})

    def run(self, records: Sequence[Record], figures: Mapping[str, Any]) -> None:
        for record in records:
            self._line("request", {"run": figures["run"], **record.as_json()})
        self._line("figures", figures)
        self._file.flush()

    def end(self, found: Mapping[str, Any]) -> None:
        self._line("end", found)

    def _line(self, kind: str, content: Mapping[str, Any]) -> None:
        json.dump({"kind": kind, **content}, self._file, separators=(",", ":"))
        self._file.write("\n")


def _versions() -> dict[str, Any]:
    packages = {name: importlib.metadata.version(name) for name in ("grpcio", "protobuf", "numpy")}
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {
            "python": sys.version.split()[0],
            "system": platform.platform(),
            "jaxinfer": __version__,  # of the source, which need not be installed
            **packages,
        },
    }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, pathlib.Path) else value
