"""Interactive progress bar for `LLM.generate`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import rich.console
import rich.progress
import rich.text

Count = Callable[[int, int], None]
"""Callback with the number of new tokens and the number of prompts that finished."""


@contextlib.contextmanager
def prompts_bar(prompts: int, show: bool | None) -> Iterator[Count]:
    """Draw finished prompts and tokens per second on stderr; the bar disappears when the block ends.

    Args:
        show: None: if stderr is a terminal, or in a notebook.
    """
    console = rich.console.Console(stderr=True, force_terminal=show or None)
    if show is False or not (console.is_terminal or console.is_jupyter):
        yield lambda tokens, done: None
        return
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        _TokensPerSecond(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("prompts", total=prompts, tokens=0)

        def count(tokens: int, done: int) -> None:
            bar.update(task, advance=done, tokens=bar.tasks[0].fields["tokens"] + tokens)

        yield count


class _TokensPerSecond(rich.progress.ProgressColumn):
    def render(self, task: rich.progress.Task) -> rich.text.Text:
        rate = task.fields["tokens"] / task.elapsed if task.elapsed else 0.0
        return rich.text.Text(f"{rate:,.0f} tokens/s")
