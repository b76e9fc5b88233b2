"""Path validation for folders of weights that operators name. No jax."""

from __future__ import annotations

import pathlib

from jaxinfer.lora.folders import is_file_below, path_below
from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.errors import short

_READ = ("*.safetensors", "*.json")  # files of a folder that may be read


def weights_folder(root: pathlib.Path, path: str) -> pathlib.Path:
    """Return the folder of weights that an operator names, below the root that the server was started with.

    Args:
        root: files below it, with links resolved within it, may be read.
        path: path below ``root``, relative to it or absolute.

    Raises:
        RequestError: there is no such folder below ``root``; it has no safetensors; or one of its files links outside
            of ``root``. The message never reveals whether a path outside of ``root`` exists.
    """
    wanted, said = pathlib.PurePath(path), f"={short(path)}"
    if "\0" in path or "://" in path or ".." in wanted.parts:
        raise RequestError("path", f"{said} is not a path below the folder of weights")
    top = root.resolve()
    folder = path_below(top, top / wanted)
    if folder is None or not folder.is_dir():
        raise RequestError("path", f"{said} is no folder below the folder of weights")
    if not any(folder.glob(_READ[0])):
        raise RequestError("path", f"{said} has no safetensors, and other formats are not read")
    for found in (each for pattern in _READ for each in folder.glob(pattern)):
        if not is_file_below(top, found):
            raise RequestError("path", f"{said}: {found.name} is no regular file below the folder of weights")
    return folder
