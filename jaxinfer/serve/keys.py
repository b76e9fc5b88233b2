"""Create API keys for a server: `jaxinfer keys new alice --scopes infer,observe >> keys.yaml`. No jax.

The entry for the keys file, which has only the key's hash, goes to stdout. The key itself is shown once, on stderr. To
revoke a key, delete its entry: servers notice within a second, and end the key's requests.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxinfer.cli.app import run as run_command
from jaxinfer.cli.parser import Parser
from jaxinfer.serve.api.auth import SCOPES, KeysError, key_entry, new_key

_ABOUT = """Create an API key for a server. The entry for the keys file, which has only the key's hash, goes to stdout.
The key itself is shown once, on stderr. To revoke a key, delete its entry: servers notice within a second."""
_EXAMPLES = (
    "jaxinfer keys new alice --scopes infer,observe >> keys.yaml",
    "jaxinfer keys hash alice < key.txt >> keys.yaml",
)
_SHORTEST = 32  # characters; shorter keys could be found by trial from the hashes in the file


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `run`."""
    return run_command("keys", argv)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags."""
    parser = Parser("jaxinfer keys", _ABOUT, _EXAMPLES, ("scopes", "cache_group", "weight"))
    what = "new: create a key; hash: hash the key on standard input"
    parser.add_argument("what", choices=("new", "hash"), metavar="new|hash", help=what)
    parser.add_argument("name", metavar="NAME", help="tenant, with its own request ids, cached prefixes and turns")
    group = parser.add_argument_group("key entry")
    scopes = f"scopes of the key: some of {','.join(SCOPES)} (default: infer)"
    group.add_argument("--scopes", default="infer", metavar="NAME,...", help=scopes)
    shared = "group of tenants that share cached prefixes (default: no sharing)"
    group.add_argument("--cache-group", metavar="NAME", help=shared)
    group.add_argument("--weight", type=float, metavar="X", help="weight under the fair scheduling policy (default: 1)")
    args: argparse.Namespace = parser.parse_args(argv)
    return args


def run(args: argparse.Namespace) -> int:
    """Write the entry of a key and return the exit status: 2 for an invalid key, name or scope."""
    try:
        key = new_key() if args.what == "new" else _given_key()
        entry = key_entry(key, args.name, args.scopes.split(","), args.cache_group, args.weight)
    except KeysError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(entry)
    if args.what == "new":
        sys.stderr.write(f"{key}\n")
    return 0


def _given_key() -> str:
    key = sys.stdin.readline().strip()
    if len(key) < _SHORTEST:
        raise KeysError(f"a key of {len(key)} characters can be guessed: it must have at least {_SHORTEST}")
    return key


if __name__ == "__main__":
    sys.exit(main())
