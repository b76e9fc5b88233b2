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
_ABOUT = """Operate a server over its control port (--control-port): stats prints its figures, drain has it accept no
more requests and waits for those that run, abort ends one request, flush forgets cached prefixes. Answers are JSON."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags. A missing or superfluous argument of the action ends the command."""
    parser = Parser("jaxinfer control", _ABOUT, _EXAMPLES, _COMMON)
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument("request_id", nargs="?", metavar="ID", help="abort: the request's id")
    server = parser.add_argument_group("server")
    server.add_argument("--target", default=TARGET, metavar="HOST:PORT", help=f"control port (default: {TARGET})")
    key = "its first line is an API key with the scopes admin and observe"
    server.add_argument("--api-key-file", type=pathlib.Path, metavar="FILE", help=key)
    authority = "TLS, with the server's certificate checked by these (PEM)"
    server.add_argument("--ca-file", type=pathlib.Path, metavar="FILE", help=authority)
    server.add_argument("--timeout", type=float, metavar="SECONDS", help="of the call (default: none)")
    action = parser.add_argument_group("actions")
    within = "drain: requests that run after this time are aborted (default: the server's drain_seconds)"
    action.add_argument("--within", type=float, metavar="SECONDS", help=within)
    action.add_argument("--tenant", metavar="NAME", help="abort: only a request of this API key (default: of any)")
    args: argparse.Namespace = parser.parse_args(argv)
    if args.action == "abort" and args.request_id is None:
        parser.error("abort needs the id of a request: jaxinfer control abort ID")
    if args.action != "abort" and args.request_id is not None:
        parser.error(f"{args.request_id} is one word too many")
    return args
