"""Companion files of a model's weights: tokenizer, chat templates, settings and licences."""

from __future__ import annotations

import pathlib
import shutil

from jaxinfer.weights.formats.beside import FILES
from jaxinfer.weights.formats.fields import CONFIG_FILE
from jaxinfer.weights.native.manifest import MANIFEST, UNFINISHED
from jaxinfer.weights.source import TEMPLATES

# Licences (.txt) must be passed on with the weights.
_COMPANIONS = (".json", ".jinja", ".model", ".txt")
# Files that describe the weights themselves; the new folder describes its own weights in config.json.
_OF_WEIGHTS = (CONFIG_FILE, *FILES, MANIFEST, UNFINISHED)
_LEGAL = ("LICENSE", "NOTICE", "USE_POLICY")


def copy_companions(source: pathlib.Path, folder: pathlib.Path) -> None:
    """Copy the companion files of a model folder: all except its weights, their descriptions and config.json."""
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, folder / TEMPLATES, dirs_exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _COMPANIONS and not path.name.endswith(".index.json"):
            if path.name not in _OF_WEIGHTS:
                shutil.copyfile(path, folder / path.name)
        elif path.is_file() and path.name.partition(".")[0] in _LEGAL:
            shutil.copyfile(path, folder / path.name)
