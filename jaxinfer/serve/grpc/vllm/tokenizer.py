"""GetTokenizer: a model's tokenizer files as an archive, for routers that have no copy of them.

The archive of a folder is deterministic, so that routers recognise replicas of the same model by its hash.
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

from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.grpc.vllm import messages
from jaxinfer.text.files import read_bytes
from jaxinfer.text.load import gguf_files
from jaxinfer.text.pieces import TokenizerError

NAMES = frozenset(
    {
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("vocab.json", "merges.txt", "chat_template.json"),
        # model type and EOS token ids
        *("config.json", "generation_config.json"),
    }
)
SUFFIXES = (".model", ".tiktoken", ".jinja")
"""Names and suffixes of the files that are sent; no other files of the folder are."""

MAX_BYTES = 256 << 20
"""Maximum bytes of all files together; routers accept 200 MiB packed, and 500 MiB unpacked."""
MAX_FILES = 32
CHUNK_BYTES = 64 << 10
_BEGINNING = (1980, 1, 1, 0, 0, 0)  # earliest ZIP timestamp


class Bundle(NamedTuple):
    """Bytes of an archive, and their SHA-256 as hexadecimal digits."""

    data: bytes
    sha256: str


class Bundles:
    """Creates the archive of a folder once and keeps it in memory (a few megabytes)."""

    def __init__(self) -> None:
        self._making = asyncio.Lock()
        self._made: tuple[pathlib.Path, Bundle] | None = None

    async def of(self, path: pathlib.Path) -> Bundle:
        """Return the archive of a model's folder, or of the tokenizer in a GGUF file.

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
    """Create the archive, see `Bundles.of`. Raises `TokenizerError` without the path, which clients must not learn."""
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
    """Return the real path of a file; None: it is outside the folder. In a snapshot of the Hugging Face cache, files
    are symlinks to blobs of the same repository, which count as inside."""
    top = folder.resolve()
    blobs = top.parent.parent / "blobs" if top.parent.name == "snapshots" else top
    try:
        real = (top / name).resolve(strict=True)
    except (OSError, RuntimeError):
        return None
    return real if real.is_file() and real.parent in (top, blobs) else None


def chunks(made: Bundle) -> Iterator[messages.common.GetTokenizerChunk]:
    """Yield messages of the archive in order; the last one has the hash."""
    for first in range(0, len(made.data), CHUNK_BYTES):
        last = first + CHUNK_BYTES >= len(made.data)
        part = made.data[first : first + CHUNK_BYTES]
        yield messages.common.GetTokenizerChunk(data=part, sha256=made.sha256 if last else "")
