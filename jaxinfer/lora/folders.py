"""Path validation for adapter folders that untrusted requests name. No jax."""

from __future__ import annotations

import pathlib

from jaxinfer.lora.errors import AdapterError

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"


def adapter_folder(root: pathlib.Path, path: str) -> pathlib.Path:
    """Return the folder of an adapter that a request names, below the folder that the operator has set.

    Args:
        root: files below it, with links resolved within it, may be read.
        path: path below ``root``, relative to it or absolute.

    Raises:
        AdapterError: there is no such folder below ``root``, or it or one of its files links outside of it or is no
            regular file. The message never reveals whether a path outside of ``root`` exists.
    """
    wanted, said = pathlib.PurePath(path), f"lora_path {path[:120]!r}"
    if not path or "\0" in path or ".." in wanted.parts:
        raise AdapterError(f"{said} is not a path below the folder of adapters")
    top = root.resolve()
    folder = path_below(top, top / wanted)
    if folder is None or not folder.is_dir():
        raise AdapterError(f"{said} is no folder below the folder of adapters")
    for name in (CONFIG_FILE, TENSORS_FILE, PICKLED_FILE):
        found = folder / name
        if (found.exists() or found.is_symlink()) and not is_file_below(top, found):
            raise AdapterError(f"{said}: {name} is no regular file below the folder of adapters")
    return folder


def path_below(top: pathlib.Path, path: pathlib.Path) -> pathlib.Path | None:
    """Return the path with links resolved; None if it does not exist or is not below ``top``."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        return None
    return real if real.is_relative_to(top) else None


def is_file_below(top: pathlib.Path, path: pathlib.Path) -> bool:
    """Whether the path, with links resolved, is a regular file below ``top``, which has no links."""
    real = path_below(top, path)
    return real is not None and real.is_file()
