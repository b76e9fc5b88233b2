"""Progress bars on stderr for interactive use."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import rich.console
import rich.progress

from jaxinfer.weights.load import Progress


def loading_bar(title: str = "loading weights") -> contextlib.AbstractContextManager[Progress | None]:
    """Yield a ``progress`` callback for ``load_params`` that draws a bar on stderr; None if stderr is not a terminal.

    The bar disappears when the block ends.
    """
    return _bar(title, rich.progress.DownloadColumn(binary_units=True), rich.progress.TransferSpeedColumn())


def counting_bar(title: str) -> contextlib.AbstractContextManager[Progress | None]:
    """Yield a ``progress`` callback as `loading_bar` does, for items counted one by one instead of bytes."""
    return _bar(title, rich.progress.MofNCompleteColumn())


@contextlib.contextmanager
def _bar(title: str, *amount: rich.progress.ProgressColumn) -> Iterator[Progress | None]:
    if not sys.stderr.isatty():
        yield None
        return
    text = rich.progress.TextColumn("{task.description}")
    columns = (text, rich.progress.BarColumn(), *amount, rich.progress.TimeRemainingColumn())
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)

        def show(done: int, total: int, name: str) -> None:
            del name
            bar.update(task, completed=done, total=total)

        yield show
