"""What modules of `tools.oracle` answer: committed as golden files, or asked live (`live_answers` of the conftest)."""

import gzip
import json
import pathlib
from typing import Any

Answers = dict[str, Any]


def load_answers(path: pathlib.Path) -> Answers:
    """The answers in a ``.json.gz``."""
    found: Answers = json.loads(gzip.decompress(path.read_bytes()))
    return found
