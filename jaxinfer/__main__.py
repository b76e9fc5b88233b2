"""Entry point of `python -m jaxinfer`: the `jaxinfer` command."""

import sys

from jaxinfer.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
