"""Cache of calibration results by the digest of the executables that they are about."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from jaxinfer.compilations.files import FORM, folder_of, sources, write

_METADATA = re.compile(r", metadata={[^}]*}")


def digest_of(stages: Iterable[Any]) -> str:
    """Return a digest of the executables of compiled stages: of XLA's output, including the library calls and tiles
    that autotuning chose, which differ between compilations."""
    digest = hashlib.sha256(jax.devices()[0].client.platform_version.encode())
    for stage in stages:
        for executable in _executables(stage):
            digest.update("\n".join(_instructions(executable.as_text())).encode())
    return digest.hexdigest()


def _instructions(text: str) -> Iterator[str]:
    """Yield the instructions of a program, without source locations, which differ in a cached program."""
    for line in text.splitlines():
        if " = " in line:
            yield _METADATA.sub("", line)


def _executables(stage: Any) -> Iterator[Any]:
    for field in dataclasses.fields(stage):
        one = getattr(stage, field.name)
        if dataclasses.is_dataclass(one):
            yield from _executables(one)
        elif isinstance(one, Mapping):
            yield from one.values()
        elif one is not None:
            yield one


def found_out(
    digest: str | None, settings: str, find_out: Callable[[], dict[str, Any]], known: Callable[[Any], bool]
) -> dict[str, Any]:
    """Return what an earlier start found out about the same executables with the same ``settings``, or else the result
    of ``find_out``, as JSON.

    Args:
        digest: digest of the executables (`digest_of`); None: unknown.
        known: whether the contents of a file are a valid result.
    """
    folder = folder_of("calibrated")
    if folder is None or digest is None:
        return find_out()
    name = hashlib.sha256("\0".join([FORM, sources(), digest, settings]).encode()).hexdigest()
    path = folder / f"{name}.json"
    with contextlib.suppress(OSError, ValueError):
        earlier: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if known(earlier):
            return earlier
    found = find_out()
    write(path, json.dumps(found).encode())
    return found
