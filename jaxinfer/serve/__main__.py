"""Serve a model over gRPC and HTTP: `python -m jaxinfer.serve` or `jaxinfer serve MODEL`. See docs/serving.md."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence

from jaxinfer.cli.app import run as run_command
from jaxinfer.serve.api.auth import KeysError
from jaxinfer.serve.core.worker_node import Follower
from jaxinfer.serve.frontend.preflight import check_early
from jaxinfer.serve.runtime import event_loop, logs, malloc_trim
from jaxinfer.serve.server import Server
from jaxinfer.serve.settings import ServeConfig, ServeConfigError

CANNOT_BE = 2
"""Exit code for an invalid setting, model or file: a restart with the same configuration would fail again."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command("serve", arguments)


def run(args: argparse.Namespace) -> int:
    """Run the server that ``args.configuration`` describes and return its exit status."""
    config: ServeConfig = args.configuration
    try:
        check_early(config)
        logs.configure(config.log_format, config.log_level)
        follows = config.process_id > 0
        return event_loop.run(serve(Follower(config) if follows else Server(config, opened=malloc_trim.settle)))
    except (ServeConfigError, KeysError) as error:
        logs.say(f"error: {error}")
        return CANNOT_BE


async def serve(server: Server | Follower) -> int:
    """Serve until a signal or a permanent startup failure; return the exit status of the process."""
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    loop.add_signal_handler(signal.SIGHUP, server.reload)
    try:
        await server.start()
        tidying = server.background.start("heap", lambda: malloc_trim.tidy(lambda: server.active))
        signalled, failed = asyncio.create_task(signals.get()), asyncio.create_task(server.until_failed())
        await asyncio.wait({signalled, failed}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            logs.say(f"error: {failed.result()}")
            return CANNOT_BE
        tidying.cancel()
        await _until_drained(server, signals)
        return 0
    finally:
        await server.stop()


async def _until_drained(server: Server | Follower, signals: asyncio.Queue[int]) -> None:
    """Wait until running requests have drained, or until a second signal."""
    draining, again = asyncio.create_task(server.drain()), asyncio.create_task(signals.get())
    await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, again):
        task.cancel()
    await asyncio.gather(draining, again, return_exceptions=True)


if __name__ == "__main__":
    sys.exit(main())
