"""Ctrl-C, and the terminal that it leaves behind; readers who leave."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
"""The exit code of what Ctrl-C has ended."""

CUT_OFF = 128 + signal.SIGPIPE
"""The exit code where whoever read the output has left, as `head` does."""

_SHOW_CURSOR = b"\x1b[?25h\n"  # on a line of its own: the shell's prompt comes next


def show_cursor() -> None:
    """Give a terminal its cursor back, which a bar may have hidden."""
    if os.isatty(2):
        os.write(2, _SHOW_CURSOR)


def until_cut_off(work: Callable[[], int]) -> int:
    """Do ``work`` for its exit code. Where its output has no reader any more it ends in silence, as other programs do;
    where there is no room for it, with a sentence."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        code = CUT_OFF
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"error: what was to be written has no room: {error.strerror}", file=sys.stderr)
        code = 1
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more
    return code


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """Ctrl-C in this block ends the process, and nothing can catch it.

    As an exception it would come up in the middle of somebody's import or callback, where some print a traceback and
    others swallow it. For blocks that leave nothing half done.
    """
    with _handling(lambda *_: _leave()):
        yield


@contextlib.contextmanager
def stopping() -> Iterator[threading.Event]:
    """The first Ctrl-C in this block sets the event; a second one raises KeyboardInterrupt."""
    asked = threading.Event()

    def handle(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    with _handling(handle):
        yield asked


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # the only one that may set handlers, or gets signals
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave() -> None:
    with contextlib.suppress(RuntimeError, OSError):  # the signal may have come while it was written to
        sys.stdout.flush()
    show_cursor()
    os._exit(INTERRUPTED)
