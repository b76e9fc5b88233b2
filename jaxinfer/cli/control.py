"""Flags of `jaxinfer control`."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from jaxinfer.cli.parser import Parser

ACTIONS = ("stats", "drain", "abort", "flush")
TARGET = "localhost:50052"

_COMMON = ("target", "api_key_file", "ca_file", "within", "tenant", "timeout")
_EXAMPLES = (
    "jaxinfer control stats",
    "jaxinfer control drain --within 30 --target localhost:50052",
    "jaxinfer control abort cmpl-17 --tenant alice",
)
_ABOUT = """Operate a server over its control port (--control-port): stats prints statistics, drain
rejects new requests and waits for running ones, abort ends a request, flush clears the prefix cache. Output is JSON."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags. A missing or superfluous argument of the action ends the command."""
    parser = Parser("jaxinfer control", _ABOUT, _EXAMPLES, _COMMON)
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=f"action: {', '.join(ACTIONS)}")
    parser.add_argument("request_id", nargs="?", metavar="ID", help="abort: id of the request")
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
    args: argparse.Namespace = parser.parse_args(argv)
    if args.action == "abort" and args.request_id is None:
        parser.error("abort needs the id of a request: jaxinfer control abort ID")
    if args.action != "abort" and args.request_id is not None:
        parser.error(f"{args.request_id} is one word too many")
    return args
