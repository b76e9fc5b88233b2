"""Makes API keys: `python -m jaxinfer.serve.keys new alice --scopes infer,observe >> keys.yaml`. No jax.

The entry for the file, which has only the key's hash, goes to stdout. The key itself is shown once, on stderr. To take
a key away, delete its entry: servers notice within a second, and end what it has begun.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxinfer.serve.auth import SCOPES, KeysError, key_entry, new_key


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 2 for a name or a scope that is not allowed."""
    parser = argparse.ArgumentParser(prog="python -m jaxinfer.serve.keys", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", help="make a key; append what is printed to the file of keys")
    new.add_argument("name", help="whose key it is: the tenant, whose ids, cached prefixes and turns are its own")
    new.add_argument("--scopes", default="infer", help=f"some of {','.join(SCOPES)} (default: infer)")
    new.add_argument("--cache-group", help="names of the same group share cached prefixes (default: with nobody)")
    new.add_argument("--weight", type=float, help="its share under the fair policy (default: 1)")
    args = parser.parse_args(arguments)
    key = new_key()
    try:
        entry = key_entry(key, args.name, args.scopes.split(","), args.cache_group, args.weight)
    except KeysError as error:
        parser.error(str(error))
    sys.stdout.write(entry)
    sys.stderr.write(f"{key}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
