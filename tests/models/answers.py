"""Answers of `tools.oracle` modules: from committed golden files, or live (`live_answers` in conftest)."""

import gzip
import json
import pathlib
from typing import Any

Answers = dict[str, Any]


def load_answers(path: pathlib.Path) -> Answers:
    """Return the answers in a ``.json.gz``."""
    found: Answers = json.loads(gzip.decompress(path.read_bytes()))
    return found
