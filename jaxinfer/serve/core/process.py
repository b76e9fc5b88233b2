"""Process setup of an engine core: settings, signals, logging and exit. No jax."""

from __future__ import annotations

import faulthandler
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO, NoReturn

from jaxinfer.serve.core import service
from jaxinfer.serve.core.service import Built, Report
from jaxinfer.serve.core.settings import CoreSettings
from jaxinfer.serve.runtime import event_loop, logs
from jaxinfer.serve.settings import ServeConfigError

MAX_SETTINGS_BYTES = 1 << 20
ORPHAN = 3
"""Exit code of a core after its front end has died."""
GROUP = 4
"""Exit code of a core after the end of its group: another process of it is gone or hangs."""

_DUMP_SECONDS = 1.0

_log = logging.getLogger("jaxinfer.serve.core")


def run(build: Callable[[CoreSettings, Report], Built], permanent: tuple[type[Exception], ...]) -> NoReturn:
    """Run an engine core: the first line of stdin has the settings; the end of stdin means that the front end has died.

    SIGUSR1 writes the stacks of all threads to stderr. Signals of a terminal or a service manager reach all processes
    of a server: here they are ignored; the front end handles them, drains, and requests the stop.

    Args:
        build, permanent: see `jaxinfer.serve.core.service.serve`.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    stdin = sys.stdin.buffer
    try:
        settings = CoreSettings.from_json(stdin.readline(MAX_SETTINGS_BYTES).decode())
    except (ServeConfigError, UnicodeDecodeError) as error:
        logs.say(f"error: {error}")
        _exit(service.FAILED)
    logs.configure(settings.log_format, settings.log_level)
    threading.excepthook = _log_fault
    threading.Thread(target=_die_with_parent, args=(stdin,), name="jaxinfer-parent", daemon=True).start()
    _exit(event_loop.run(service.serve(settings.socket, functools.partial(build, settings), permanent)))


def leave_group(reason: str, hangs: bool) -> NoReturn:
    """Exit at once; if a process hangs, first write the stacks of all threads to stderr."""
    _log.error("the group is over: %s", reason)
    if hangs:
        logs.drain()
        dumping = threading.Thread(target=faulthandler.dump_traceback, daemon=True)
        dumping.start()
        dumping.join(_DUMP_SECONDS)  # stderr may be a pipe that is not read
    _exit(GROUP)


def _die_with_parent(stdin: BinaryIO) -> None:
    while stdin.read(1024):
        pass
    _exit(ORPHAN)


def _exit(code: int) -> NoReturn:
    """Exit at once: threads may still compile, or hang in a device driver."""
    logs.drain()
    os._exit(code)


def _log_fault(fault: threading.ExceptHookArgs) -> None:
    if fault.exc_value is not None:
        info = (fault.exc_type, fault.exc_value, fault.exc_traceback)
        _log.error("a thread ended by a fault", exc_info=info)
