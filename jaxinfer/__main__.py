"""`python -m jaxinfer`: the command `jaxinfer`."""

import sys

from jaxinfer.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
