"""Handle of an engine core in the parent process: the process, its socket, and the link to it. No jax."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxinfer.serve.core.link import CoreLink, require_descriptors
from jaxinfer.serve.core.messages import Lifecycle
from jaxinfer.serve.core.settings import CoreSettings
from jaxinfer.serve.core.socket_dir import SocketFolder
from jaxinfer.serve.settings import ServeConfig

_GROUPED = "import os, sys; os.setpgid(0, 0); os.execvp(sys.argv[1], sys.argv[1:])"


class Child:
    """An engine core process. Made by `start`; `end` must be called."""

    def __init__(self, process: asyncio.subprocess.Process, folder: SocketFolder, link: CoreLink) -> None:
        self.process, self.link, self._folder = process, link, folder

    @classmethod
    async def start(cls, command: Sequence[str], config: ServeConfig, observe: Callable[[Lifecycle], None]) -> Child:
        """Start the process in its own process group, so that Ctrl-C in a terminal does not reach it.

        It stays in this session, so that helpers with idle scheduling (`jaxinfer.helper_process`) yield to it, too.

        Its stdin stays open as long as this process lives; it inherits stdout and stderr.

        Args:
            observe: see `CoreLink`.

        Raises:
            OSError: the process cannot be started.
        """
        require_descriptors()
        folder = SocketFolder.make()
        try:
            words, options = _grouped(command)
            process = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.PIPE, **options)
        except BaseException:
            folder.remove()
            raise
        assert process.stdin is not None
        process.stdin.write(CoreSettings.of(config, folder.socket).to_json().encode() + b"\n")
        return cls(process, folder, CoreLink(folder.socket, observe))

    async def dump(self, seconds: float) -> None:
        """Request the stacks of all threads in the log, and wait ``seconds`` for them."""
        self._signal(signal.SIGUSR1)
        await asyncio.sleep(seconds)

    async def end(self, grace: float) -> str:
        """Wait up to ``grace`` seconds, then kill the process; return a description of how it ended."""
        try:
            if grace > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.process.wait(), grace)
        finally:
            self._signal(signal.SIGKILL)
            code = await self.process.wait()
            self._folder.remove()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.process.returncode is None:
                self.process.send_signal(number)


def _grouped(command: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return a command and the options that start it in its own process group. uvloop, which embedding programs may
    use, has no such option: there the process changes its group, then becomes the command."""
    if isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop):
        return [*command], {"process_group": 0}
    return [sys.executable, "-IS", "-c", _GROUPED, *command], {}
