"""Files cached in addition to JAX's cache."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pathlib
import secrets

import jax

import pallas_kernels

FORM = "2"  # format version of cached files
_KINDS = ("*.py", "tiles.json", "*.npz")


def folder_of(what: str) -> pathlib.Path | None:
    """Return the folder of one kind of cached files; None: caching is off."""
    folder = jax.config.jax_compilation_cache_dir
    return None if folder is None else pathlib.Path(folder) / what


def write(path: pathlib.Path, content: bytes) -> None:
    """Replace a file atomically, because another process may read it. Write errors are ignored."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        part.write_bytes(content)
        part.replace(path)


@functools.cache
def sources() -> str:
    """Return a digest of the files that programs are made from: code, tuned tiles, codebooks."""
    digest = hashlib.sha256()
    for folder in (pathlib.Path(__file__).parents[1], pathlib.Path(pallas_kernels.__path__[0])):
        for path in sorted(path for kind in _KINDS for path in folder.rglob(kind)):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
