"""The shipped specs of this package's ops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pallas_kernels.specs import Spec, op_folders, specs_of


def shipped(prefixes: Iterable[str] = ("",)) -> list[Spec]:
    """Return the shipped specs of ops whose names begin with a prefix; import only their modules.

    Raises:
        ValueError: an op is not named after its folder, or two of its specs have the same name.
    """
    prefixes = tuple(prefixes)
    found: list[Spec] = []
    for folder in op_folders():
        if any(folder.name.startswith(prefix.split(".")[0]) for prefix in prefixes):
            its = list(dict.fromkeys(specs_of(folder.name).SHIPPED))
            _check_names(folder.name, [(one.op, one.name) for one in its])
            found += its
    return [one for one in found if one.op.startswith(prefixes)]


def _check_names(folder: str, names: Sequence[tuple[str, str]]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{folder}: specs of the same name: {twice}")
    if foreign := sorted({op for op, _ in names if op.split(".")[0] != folder}):
        raise ValueError(f"{folder}: the names of its ops must begin with it: {foreign}")
