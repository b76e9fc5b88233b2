"""Tied embeddings: reconciles config.json with the head and the embedding table that the checkpoint holds.

As in transformers: a head that differs from the table is untied, and a head without a table is used as both.
"""

from __future__ import annotations

import functools
import logging

import numpy as np

from jaxinfer.types import EMBEDDING, HEAD, ParamTree, walk_specs
from jaxinfer.weights.files import ModelFiles

_log = logging.getLogger("jaxinfer")

_ROWS = 4096  # rows compared at a time
_FLAGS = ("tie_word_embeddings", "tie_embedding")  # of transformers, and of LFM2 before transformers supported it


def with_stored_head(files: ModelFiles, untied: ParamTree, prefix: str) -> ModelFiles:
    """Return the files of a tied model adjusted to the tensors in its checkpoint.

    Args:
        untied: the specs of the model with a separate head.
        prefix: see `ModelFiles.named`.

    Returns:
        The files; with a config that ties nothing if the checkpoint has a head that differs from the table, and with
            the head read as the table if the checkpoint has no table.
    """
    if not files.shows_ties:
        return files
    specs = dict(walk_specs(files.named(untied, prefix)))
    found = [source.name for path in (EMBEDDING, HEAD) if path in specs for source in specs[path].sources]
    if len(found) != 2 or found[1] not in files.shapes:
        return files
    table, head = found
    if table not in files.shapes:
        return files.replace(renamed={table: head})
    if _same(files, table, head):
        return files
    _warn(f"{files.path}: config.json ties {head} to {table}, and the two differ: each is read as it is stored")
    flags = {name: False for name in _FLAGS if name == _FLAGS[0] or name in files.config_json}
    return files.replace(config_json={**files.config_json, **flags})


def _same(files: ModelFiles, table: str, head: str) -> bool:
    return files.shapes[table] == files.shapes[head] and all(
        map(np.array_equal, files.pieces(table, _ROWS), files.pieces(head, _ROWS))
    )


@functools.cache  # engine startup describes the model twice
def _warn(message: str) -> None:
    _log.warning(message)
