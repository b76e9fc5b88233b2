"""A model's tokenizer as an archive, for routers that have no copy of it: GetTokenizer.

The archive of a folder is the same wherever and whenever it is made, so that routers know replicas of one model by it.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import pathlib
import zipfile
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxinfer.serve.errors import Kind, ServeError
from jaxinfer.serve.grpc.vllm import messages
from jaxinfer.text.files import read_bytes
from jaxinfer.text.load import gguf_files
from jaxinfer.text.pieces import TokenizerError

NAMES = frozenset(
    {
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("vocab.json", "merges.txt", "chat_template.json"),
        # what kind of model it is, and which of its tokens end an answer
        *("config.json", "generation_config.json"),
    }
)
SUFFIXES = (".model", ".tiktoken", ".jinja")
"""Files that are sent: those of these names, and those that end so. Nothing else of a folder is."""

MAX_BYTES = 256 << 20
"""Bytes of all files together; routers take 200 MiB packed, and 500 MiB unpacked."""
MAX_FILES = 32
CHUNK_BYTES = 64 << 10
_BEGINNING = (1980, 1, 1, 0, 0, 0)  # the earliest time of an archive


class Bundle(NamedTuple):
    """The bytes of an archive, and their SHA-256 in hexadecimal digits."""

    data: bytes
    sha256: str


class Bundles:
    """Makes the archive of a folder once. It stays in memory: some megabytes."""

    def __init__(self) -> None:
        self._making = asyncio.Lock()
        self._made: tuple[pathlib.Path, Bundle] | None = None

    async def of(self, path: pathlib.Path) -> Bundle:
        """The archive of a model's folder, or of what a GGUF file has in place of one.

        Raises:
            ServeError: PRECONDITION: there are no such files, or they cannot be sent.
        """
        async with self._making:
            if self._made is None or self._made[0] != path:
                try:
                    self._made = path, await asyncio.to_thread(bundle, path)
                except TokenizerError as error:
                    raise ServeError(Kind.PRECONDITION, f"the tokenizer cannot be sent: {error}") from error
            return self._made[1]


def bundle(path: pathlib.Path) -> Bundle:
    """See `Bundles.of`. Raises `TokenizerError` without the path, which is not the client's to know."""
    files = _texts(path) if path.is_file() else dict(_files(path))
    if not files:
        raise TokenizerError("the model's folder has no files of a tokenizer")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, _BEGINNING), data, zipfile.ZIP_DEFLATED)
    data = packed.getvalue()
    return Bundle(data, hashlib.sha256(data).hexdigest())


def _texts(path: pathlib.Path) -> Mapping[str, bytes]:
    return {name: text.encode() for name, text in gguf_files(path).items()}


def _files(folder: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    names = sorted(name for name in os.listdir(folder) if name in NAMES or name.endswith(SUFFIXES))
    if len(names) > MAX_FILES:
        raise TokenizerError(f"it has {len(names)} files, and at most {MAX_FILES} are sent")
    left = MAX_BYTES
    for name in names:
        if (real := _within(folder, name)) is None:
            raise TokenizerError(f"{name} is no regular file within the model's folder")
        if real.stat().st_size > left:
            raise TokenizerError(f"its files have more than the {MAX_BYTES} bytes that are sent")
        data = read_bytes(real, left, TokenizerError)
        left -= len(data)
        yield name, data


def _within(folder: pathlib.Path, name: str) -> pathlib.Path | None:
    """Where a file is, links followed; None: not in the folder. A snapshot of the hub's cache is of links to files of
    the same repository, which count as its own."""
    top = folder.resolve()
    blobs = top.parent.parent / "blobs" if top.parent.name == "snapshots" else top
    try:
        real = (top / name).resolve(strict=True)
    except (OSError, RuntimeError):
        return None
    return real if real.is_file() and real.parent in (top, blobs) else None


def chunks(made: Bundle) -> Iterator[messages.common.GetTokenizerChunk]:
    """Messages of the archive in order; the last one has the sum."""
    for first in range(0, len(made.data), CHUNK_BYTES):
        last = first + CHUNK_BYTES >= len(made.data)
        part = made.data[first : first + CHUNK_BYTES]
        yield messages.common.GetTokenizerChunk(data=part, sha256=made.sha256 if last else "")
