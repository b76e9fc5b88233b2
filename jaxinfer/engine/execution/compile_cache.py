"""The persistent compilation cache: the second start compiles nothing that the first one did."""

from __future__ import annotations

import pathlib

import jax

DEFAULT_FOLDER = pathlib.Path("~/.cache/jaxinfer/compiled")


def use_compilation_cache(folder: str | None) -> None:
    """Keep compiled programs in ``folder`` (None: the user's cache folder; "": nowhere).

    JAX has one cache per process: the last call decides.
    """
    path = None if folder == "" else str(pathlib.Path(folder or DEFAULT_FOLDER).expanduser())
    jax.config.update("jax_compilation_cache_dir", path)
    # Every program of the engine counts, however small: startup is their sum.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
