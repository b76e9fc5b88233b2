"""Handling of Ctrl-C, the terminal state after it, and broken pipes."""

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
"""Exit code of a process ended by Ctrl-C."""

CUT_OFF = 128 + signal.SIGPIPE
"""Exit code if the reader of the output has closed the pipe, as `head` does."""

_SHOW_CURSOR = b"\x1b[?25h\n"  # with a line break: the shell's prompt comes next


def show_cursor() -> None:
    """Restore the terminal's cursor, which a progress bar may have hidden."""
    if os.isatty(2):
        os.write(2, _SHOW_CURSOR)


def until_cut_off(work: Callable[[], int]) -> int:
    """Run ``work`` and return its exit code. If the reader of its output has closed the pipe, it ends silently, as
    other programs do; if the disk is full, with one sentence."""
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
    """In this block Ctrl-C ends the process, and no code can catch it.

    As an exception it would be raised in the middle of an import or a callback of a library, where some print a
    traceback and some swallow it. For blocks that leave no work half done.
    """
    with _handling(lambda *_: _leave()):
        yield


@contextlib.contextmanager
def stopping() -> Iterator[threading.Event]:
    """In this block the first Ctrl-C sets the event; a second one raises KeyboardInterrupt."""
    asked = threading.Event()

    def handle(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    with _handling(handle):
        yield asked


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only it may set handlers and gets signals
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave() -> None:
    with contextlib.suppress(RuntimeError, OSError):  # the signal may have arrived during a write
        sys.stdout.flush()
    show_cursor()
    os._exit(INTERRUPTED)
