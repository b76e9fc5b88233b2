"""Entry point of ``jaxinfer bench serve``."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from rich.console import Console

from jaxinfer.bench import self_test, serve
from jaxinfer.bench.datasets import DatasetError
from jaxinfer.bench.names import OptionsError
from jaxinfer.bench.plot import PlotError
from jaxinfer.bench.target import TargetError
from jaxinfer.bench.traces import TraceError
from jaxinfer.cli.app import run as run_command

PIPED_WIDTH = 200  # characters: output of unknown width is not cut
ERRORS = (OptionsError, TargetError, DatasetError, TraceError, PlotError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; see `run`."""
    return run_command("bench", arguments)


def run(options: argparse.Namespace) -> int:
    """Return exit code 0; 1: no request succeeded; 2: cannot be measured (one sentence on stderr); 3: the generator was
    the bottleneck, and the figures are its own; 130: interrupted, after a report of the requests so far."""
    try:
        return asyncio.run(_command(options))
    except ERRORS as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        return serve.INTERRUPTED


async def _command(options: argparse.Namespace) -> int:
    report = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    return await (self_test.measure(report) if options.self_test else serve.measure(options, report))


if __name__ == "__main__":
    sys.exit(main())
