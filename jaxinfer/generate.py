"""`python -m jaxinfer.generate`: as `jaxinfer generate`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxinfer.cli.app import run


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one sentence on stderr for what cannot be done as asked."""
    return run("generate", argv)


if __name__ == "__main__":
    sys.exit(main())
