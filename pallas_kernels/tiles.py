"""Tuned tiles of the Mosaic kernels: data in ``<op>/tiles.json``, measured on GPUs by `python -m pallas_kernels.tune`.

A kernel that is called without tiles takes those of the nearest entry: same device kind, same options (which change the
program: page size, dtypes, ...), sizes (rows, keys, ...) closest in their logarithms. Without such an entry its
heuristic decides. Both follow from shapes and from the file alone, while a program is traced.

Fields of tiles that change the last bits of a result (``bits``: key blocks, splits) belong to the options, so that no
size changes them: a row is batch-invariant. All other fields belong to the sizes.

    {"format": 1, "note": "...", "entries": [
        {"device": "NVIDIA H100 80GB HBM3", "kernel": "paged_attention.decode", "options": {...}, "bits": {...},
         "measured": [{"sizes": {...}, "tiles": {...}, "facts": {"microseconds": 1.0, ...}}, ...]}, ...]}
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, cast

from pallas_kernels.choice import lowering_target

FORMAT = 1
NOTE = "Written by python -m pallas_kernels.tune. Without entries: no GPU has tuned this yet."
PACKAGE = pathlib.Path(__file__).parent

Option = str | int | None


@dataclasses.dataclass(frozen=True)
class Key:
    """The properties of a call that its tiles depend on.

    Attributes:
        options: compared exactly.
        sizes: at least 1 each; the nearest entry is chosen.
    """

    options: Mapping[str, Option]
    sizes: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Measured:
    """The best tiles at some sizes, without those of `Entry.bits`; ``facts`` are for readers: times, versions, date."""

    sizes: Mapping[str, int]
    tiles: Mapping[str, int]
    facts: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Entry:
    """The tuned tiles of one kernel with some options on one kind of device."""

    device: str
    kernel: str
    options: Mapping[str, Option]
    bits: Mapping[str, int]
    measured: tuple[Measured, ...]


def pick[Tiles](
    kernel: str,
    key: Key,
    heuristic: Tiles,
    refusal: Callable[[Tiles], str | None],
    *,
    device_kind: str | None = None,
    package: pathlib.Path = PACKAGE,
) -> Tiles:
    """Choose the tiles for a call without any: the nearest tuned ones that the kernel accepts, else ``heuristic``.

    If it accepts none of them, the heuristic keeps the entry's ``bits`` if it can.

    Args:
        refusal: returns why the kernel does not support such tiles, or None.
        device_kind: None: device kind of the lowering target.

    Raises:
        ValueError: ``tiles.json`` is broken; the message names the file.
    """
    kind = lowering_target().device_kind if device_kind is None else device_kind
    for fields in _nearest_first(kernel, kind, key, package):
        tiles = _replaced(heuristic, fields, tiles_file(kernel, package))
        if refusal(tiles) is None:
            return tiles
    return heuristic


def tuned(kernel: str, device_kind: str | None, key: Key, *, package: pathlib.Path = PACKAGE) -> dict[str, int] | None:
    """Return the fields of the nearest tuned tiles, or None.

    Raises:
        ValueError: ``tiles.json`` is broken; the message names the file.
    """
    return next(iter(_nearest_first(kernel, device_kind, key, package)), None)


def tiles_file(kernel: str, package: pathlib.Path = PACKAGE) -> pathlib.Path:
    """Return the path of the tiles of a kernel such as "paged_attention.decode"."""
    return package / kernel.partition(".")[0] / "tiles.json"


def _nearest_first(kernel: str, device_kind: str | None, key: Key, package: pathlib.Path) -> list[dict[str, int]]:
    for entry in _loaded(tiles_file(kernel, package)):
        if (entry.device, entry.kernel, entry.options) == (device_kind, kernel, key.options):
            ordered = sorted(entry.measured, key=lambda one: _distance(one.sizes, key.sizes))
            return [*({**entry.bits, **one.tiles} for one in ordered), dict(entry.bits)]
    return []


def _distance(sizes: Mapping[str, int], wanted: Mapping[str, int]) -> float:
    """Return the distance of two sizes in logarithms; sizes that only one of the two has count as 1."""
    names = sizes.keys() | wanted.keys()
    return math.fsum(abs(math.log(max(1, sizes.get(name, 1)) / max(1, wanted.get(name, 1)))) for name in sorted(names))


def _replaced[Tiles](heuristic: Tiles, fields: Mapping[str, int], path: pathlib.Path) -> Tiles:
    try:
        return cast(Tiles, dataclasses.replace(cast(Any, heuristic), **fields))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {dict(fields)} are no {type(heuristic).__name__} of its kernel: {error}") from error


# --------------------------------------------------------------------------------------------------------------
# The file.


def read(path: pathlib.Path) -> tuple[Entry, ...]:
    """Read the entries of a file; () if there is no file.

    Raises:
        ValueError: the format is not that of `as_text`; the message names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {FORMAT}")
        entries = tuple(_entry(fields) for fields in content["entries"])
        _check_unique(entries)
    except FileNotFoundError:
        return ()
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing; python -m pallas_kernels.tune writes this file") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}; python -m pallas_kernels.tune writes this file") from error
    return entries


@functools.cache
def _loaded(path: pathlib.Path) -> tuple[Entry, ...]:
    """Read entries once per process, so that retracing a program gives the same tiles even if the file changes."""
    return read(path)


def as_text(entries: tuple[Entry, ...]) -> str:
    """Return the file's content, in an order that depends on the entries alone."""
    ordered = sorted(entries, key=lambda one: (one.kernel, one.device, json.dumps(dict(one.options), sort_keys=True)))
    content = {"format": FORMAT, "note": NOTE, "entries": [dataclasses.asdict(one) for one in ordered]}
    return json.dumps(content, indent=1) + "\n"


def _entry(fields: Mapping[str, Any]) -> Entry:
    options, measured = fields["options"], tuple(_measured(one) for one in fields["measured"])
    if not all(isinstance(value, str | int | None) for value in options.values()):
        raise ValueError(f"options {options} are not all text, integers or null")
    if not isinstance(fields["device"], str) or not isinstance(fields["kernel"], str):
        raise ValueError(f"device {fields['device']!r} and kernel {fields['kernel']!r} must be text")
    return Entry(fields["device"], fields["kernel"], dict(options), _integers(fields["bits"]), measured)


def _measured(fields: Mapping[str, Any]) -> Measured:
    return Measured(_integers(fields["sizes"]), _integers(fields["tiles"]), dict(fields["facts"]))


def _integers(fields: Mapping[str, Any]) -> dict[str, int]:
    if not all(type(value) is int and value > 0 for value in fields.values()):
        raise ValueError(f"{fields} are not all positive integers")
    return dict(fields)


def _check_unique(entries: tuple[Entry, ...]) -> None:
    """Raise ValueError for two entries with the same options: their bits could differ."""
    keys = [(one.device, one.kernel, one.options) for one in entries]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"more than one entry for {twice[0]}")
