"""Entry point of `python -m jaxinfer.generate`: the `jaxinfer generate` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxinfer.cli.app import run


def main(argv: Sequence[str] | None = None) -> int:
    """Return exit code 0, or 2 with one sentence on stderr for an error."""
    return run("generate", argv)


if __name__ == "__main__":
    sys.exit(main())
