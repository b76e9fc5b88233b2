"""Serve a model over gRPC and HTTP.

    python -m jaxinfer.serve --model demo --http-port 8000
    python -m jaxinfer.serve --config configs/deployments/demo.yaml

Settings come from --config, and flags go before it. SIGTERM or Ctrl-C ends the server when its requests have ended,
after --drain-seconds at the latest; a second one ends them at once. See docs/serving.md.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

from jaxinfer.config import EngineConfig
from jaxinfer.flags import add_flags, given_settings
from jaxinfer.serve import event_loop, heap, logs
from jaxinfer.serve.auth import KeysError
from jaxinfer.serve.calls import ServeLimits
from jaxinfer.serve.follower import Follower
from jaxinfer.serve.server import Server
from jaxinfer.serve.settings import ServeConfig, ServeConfigError, make_config, read_settings

_NESTED = ("limits", "engine")
_LIMIT = "limit_"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    try:
        config = make_config(*_layers(parse(arguments)))
        logs.configure(config.log_format, config.log_level)
        follows = config.process_id > 0
        return event_loop.run(serve(Follower(config) if follows else Server(config, opened=heap.settle)))
    except (ServeConfigError, KeysError) as error:
        logs.say(f"error: {error}")
        return 2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags; what is not given is None."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxinfer.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=pathlib.Path, help="YAML file of settings, as in configs/deployments")
    add_flags(parser.add_argument_group("server"), ServeConfig, skip=_NESTED)
    add_flags(parser.add_argument_group("limits of one request"), ServeLimits, prefix=_LIMIT)
    add_flags(parser.add_argument_group("engine"), EngineConfig)
    return parser.parse_args(arguments)


def _layers(args: argparse.Namespace) -> list[dict[str, Any]]:
    flags = given_settings(args, ServeConfig, skip=_NESTED)
    flags["limits"] = given_settings(args, ServeLimits, prefix=_LIMIT)
    flags["engine"] = given_settings(args, EngineConfig)
    return [flags] if args.config is None else [read_settings(args.config), flags]


async def serve(server: Server | Follower) -> int:
    """Serve until a signal or a start that can only fail; the process's exit status."""
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        await server.start()
        tidying = asyncio.create_task(heap.tidy(lambda: server.active))
        signalled, failed = asyncio.create_task(signals.get()), asyncio.create_task(server.until_failed())
        await asyncio.wait({signalled, failed}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            logs.say(f"error: {failed.result()}")
            return 1
        tidying.cancel()
        await _until_drained(server, signals)
        return 0
    finally:
        await server.stop()


async def _until_drained(server: Server | Follower, signals: asyncio.Queue[int]) -> None:
    """Wait until requests have drained, or for a second signal."""
    draining, again = asyncio.create_task(server.drain()), asyncio.create_task(signals.get())
    await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, again):
        task.cancel()
    await asyncio.gather(draining, again, return_exceptions=True)


if __name__ == "__main__":
    sys.exit(main())
