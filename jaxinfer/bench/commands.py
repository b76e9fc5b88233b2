"""Flags of ``jaxinfer bench``: of its command ``serve``, or of those that measure an engine in this process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxinfer.bench import offline_options, options


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags. ``work`` is the module that runs the command, where it is not that of ``serve``."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in offline_options.COMMANDS:
        return offline_options.parse(words)
    return options.parse(words)
