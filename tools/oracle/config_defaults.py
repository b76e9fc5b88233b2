"""Oracle of config defaults: the value that transformers takes for each field missing from a config.json.

``python -m tools.oracle.config_defaults OUT`` writes, for each architecture, two configurations: with all defaults, and
a tiny one. Each has, by field, the fields that change without it: mostly its own default (a
field that is null then may be absent). It also has the aliases of its fields.
"""

from __future__ import annotations

import gzip
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError

from tools.oracle.cases import ARCHITECTURES, CASES
from tools.oracle.run import config_json, read_config
from tools.oracle.wrapper_ties import WRAPPERS

TEXT = "text_config"
# Fields of the file, not of a model: its writer and version.
LABELS = (
    "architectures",
    "model_type",
    "transformers_version",
    "dtype",
    "_name_or_path",
    "vision_config",
    "audio_config",
)


def answers() -> dict[str, Any]:
    """Return, by configuration name, the configuration, and by field the fields that differ without it."""
    return {
        name: {"config": config, "without": _without(config), "aliases": _aliases(config)}
        for name, config in _configurations()
    }


def _configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    for kind, architecture in sorted(ARCHITECTURES.items()):
        tiny = next(config_json(case) for case in CASES if case.model_type == kind)
        yield f"{architecture} tiny", _resolved({**tiny, "architectures": [architecture]})
        yield f"{architecture} default", _resolved({"architectures": [architecture], "model_type": kind})
    for architecture, (kind, text) in sorted(WRAPPERS.items()):
        inner = {TEXT: {"model_type": text}}
        yield f"{architecture} default", _resolved({"architectures": [architecture], "model_type": kind, **inner})


def _resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as transformers reads it, every field spelt out."""
    found = json.loads(read_config(config).to_json_string(use_diff=False))
    left = ("vision_config", "audio_config") if TEXT in found else ()
    return {name: value for name, value in found.items() if name not in left} | {
        "architectures": config["architectures"]
    }


def _aliases(config: dict[str, Any]) -> dict[str, str]:
    """Return the aliases of fields."""
    parsed = read_config(config)
    return dict(type(getattr(parsed, TEXT, parsed)).attribute_map)


def _without(config: dict[str, Any]) -> dict[str, Any]:
    inner = config.get(TEXT, config)
    found: dict[str, Any] = {}
    for field in inner:
        if field in (*LABELS, TEXT):
            continue
        less = {name: value for name, value in inner.items() if name != field}
        try:
            read = _resolved({**config, TEXT: less} if TEXT in config else less)
        except (ValueError, StrictDataclassError) as error:
            found[field] = type(error).__name__
            continue
        read = read.get(TEXT, read)
        changed = {name: value for name, value in read.items() if inner.get(name, ...) != value}
        found[field] = changed if field in read else {**changed, field: None}
    return found


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    pathlib.Path(sys.argv[1]).write_bytes(gzip.compress(json.dumps(answers()).encode(), mtime=0))
