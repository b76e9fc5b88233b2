"""Flags of `jaxinfer control`."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from jaxinfer.cli.parser import Parser

ACTIONS = (
    *("stats", "drain", "abort", "flush", "start-profile", "stop-profile"),
    *("pause", "resume", "abort-all", "sleep", "wake-up", "update-weights", "weight-info"),
)
ARGUMENTS = {"abort": "the id of a request", "update-weights": "a folder of weights"}
"""Actions with an argument, and what it is."""
MODES = ("wait", "keep", "abort")
TARGET = "localhost:50052"

_COMMON = (
    "target",
    "api_key_file",
    "ca_file",
    "within",
    "tenant",
    "mode",
    "level",
    "tags",
    "weight_version",
    "steps",
    "timeout",
)
_EXAMPLES = (
    "jaxinfer control stats",
    "jaxinfer control drain --within 30 --target localhost:50052",
    "jaxinfer control abort cmpl-17 --tenant alice",
    "jaxinfer control update-weights run/step-100 --mode keep",
)
_ABOUT = """Operate a server over its control port (--control-port): stats prints statistics, drain
rejects new requests and waits for running ones, abort ends a request, flush clears the prefix cache, start-profile and
stop-profile write a trace of the device (--profile-dir of the server); pause, resume,
abort-all, sleep, wake-up, update-weights and weight-info change and show a running engine. Output is JSON."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags. A missing or superfluous argument of the action ends the command."""
    parser = Parser("jaxinfer control", _ABOUT, _EXAMPLES, _COMMON)
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=f"action: {', '.join(ACTIONS)}")
    parser.add_argument("argument", nargs="?", metavar="ID|PATH", help="abort: request; update-weights: folder")
    server = parser.add_argument_group("server")
    server.add_argument("--target", default=TARGET, metavar="HOST:PORT", help=f"control address (default: {TARGET})")
    key = "file whose first line is an API key with the scopes admin and observe"
    server.add_argument("--api-key-file", type=pathlib.Path, metavar="FILE", help=key)
    authority = "PEM file of the CAs that verify the server's certificate; enables TLS"
    server.add_argument("--ca-file", type=pathlib.Path, metavar="FILE", help=authority)
    server.add_argument("--timeout", type=float, metavar="SECONDS", help="time limit of the call (default: none)")
    action = parser.add_argument_group("actions")
    within = "drain: abort requests that still run after this time (default: the server's drain_seconds)"
    action.add_argument("--within", type=float, metavar="SECONDS", help=within)
    action.add_argument("--tenant", metavar="NAME", help="abort: name of the request's API key (default: any)")
    mode = f"pause, sleep, update-weights: what becomes of running requests: {', '.join(MODES)}"
    action.add_argument("--mode", choices=MODES, metavar="MODE", help=mode)
    level = "sleep: 1: keep a copy of the weights in the host's memory (default), 2: drop them"
    action.add_argument("--level", type=int, choices=(1, 2), default=1, metavar="LEVEL", help=level)
    tags = "sleep, wake-up: kv_cache, weights (default: both)"
    action.add_argument("--tags", nargs="+", default=[], metavar="TAG", help=tags)
    version = "update-weights: version of the weights (default: the next one)"
    action.add_argument("--weight-version", type=int, metavar="N", help=version)
    parts = "update-weights: folders with the tensors that the first one lacks"
    action.add_argument("--parts", nargs="+", default=[], metavar="PATH", help=parts)
    action.add_argument("--steps", type=int, metavar="N", help="start-profile: steps of the profile (default: 1000)")
    args: argparse.Namespace = parser.parse_args(argv)
    if (what := ARGUMENTS.get(args.action)) is not None and args.argument is None:
        parser.error(f"{args.action} needs {what}: jaxinfer control {args.action} ...")
    if args.action not in ARGUMENTS and args.argument is not None:
        parser.error(f"{args.argument} is one word too many")
    return args
