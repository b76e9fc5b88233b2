"""Progress bar of a run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from jaxinfer.bench.record import Record

INTERVAL = 1.0  # seconds: drawing takes milliseconds of the measurement


class Progress:
    """A progress bar on a terminal, no output elsewhere. ``total``: requests; None: unknown."""

    def __init__(self, console: Console, total: int | None) -> None:
        self._console, self._total = console, total
        self._ended = self._failed = self._tokens = 0

    def on_end(self, record: Record) -> None:
        self._ended += 1
        self._failed += record.error_kind is not None
        self._tokens += record.output_tokens

    @contextlib.contextmanager
    def shown(self, records: Sequence[Record]) -> Iterator[None]:
        """Show the bar within the block. ``records``: the growing list of sent requests."""
        if not self._console.is_terminal:
            yield
            return
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Bars(*columns, console=self._console, auto_refresh=False, transient=True) as bars:
            task = asyncio.get_running_loop().create_task(self._follow(bars, records))
            try:
                yield
            finally:
                task.cancel()

    async def _follow(self, bars: Bars, records: Sequence[Record]) -> None:
        bar, before = bars.add_task("", total=self._total), 0
        while True:
            words = f"{len(records) - self._ended} under way, {(self._tokens - before) / INTERVAL:.0f} tokens/s"
            before = self._tokens
            failed = f", {self._failed} failed" if self._failed else ""
            bars.update(bar, completed=self._ended, description=words + failed, refresh=True)
            await asyncio.sleep(INTERVAL)
