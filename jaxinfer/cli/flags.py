"""Command-line flags derived from fields of settings dataclasses, the only source of name, type, default and help."""

from __future__ import annotations

import argparse
import dataclasses
import decimal
import inspect
import re
import sys
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, override

from jaxinfer.config import EngineConfig
from jaxinfer.config.aliases import ALIASES, PRESETS, our_settings

_SWITCHES = {"on": True, "off": False}
_METAVARS = {int: "N", float: "X"}
_NUMBER = re.compile(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?|[-+]?(inf|nan)", re.IGNORECASE)
_SIZE = re.compile(r"([-+]?[0-9]+(?:\.[0-9]+)?)([kmgtKMGT])?(i?B)?")
_SHORT = 2  # maximum length of names that other engines write with one dash: -tp


def add_groups(
    parser: argparse.ArgumentParser,
    kind: type,
    skip: Collection[str] = (),
    defaults: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add an argument group for each group of settings, that is for each dataclass that ``kind`` is composed of."""
    for title, names in setting_groups(kind):
        rest = {field.name for field in dataclasses.fields(kind)} - set(names)
        if set(names) - set(skip):
            add_flags(parser.add_argument_group(title), kind, {*skip, *rest}, defaults=defaults)


class _Preset(argparse.Action):
    """Print the settings of a preset as flags."""

    @override
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        flags = " ".join(f"{_flags(name)[-1]} {value}" for name, value in PRESETS[values].items())
        sys.stderr.write(f"preset {values}: {flags}\n")
        setattr(namespace, self.dest, values)


def add_preset(parser: argparse.ArgumentParser) -> None:
    """Add ``--preset``, which stands for engine settings (`jaxinfer.config.aliases.PRESETS`)."""
    about = "settings for a purpose, printed as flags; flags that are given override them (docs/performance.md)"
    parser.add_argument("--preset", action=_Preset, choices=tuple(PRESETS), help=about)


def setting_groups(kind: type) -> Iterator[tuple[str, list[str]]]:
    """Yield the groups of settings of ``kind``: the first words of each base's docstring, and its own fields."""
    groups = [each for each in reversed(kind.__mro__[1:]) if dataclasses.is_dataclass(each)] or [kind]
    for group in groups:
        yield re.split(r"[.:]", group.__doc__ or "", maxsplit=1)[0], list(vars(group).get("__annotations__", {}))


def add_flags(
    group: argparse._ArgumentGroup,
    kind: type,
    skip: Collection[str] = (),
    prefix: str = "",
    defaults: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add a flag for each field of the dataclass ``kind`` except those in ``skip``; a flag that is not given is None.

    ``enable_x`` becomes ``--enable-x`` and ``--no-enable-x``, as does a boolean that is false by default; any other
    boolean takes ``on`` or ``off``. Names of other engines work, too (`jaxinfer.config.aliases.ALIASES`).

    Args:
        prefix: prefix of all flags.
        defaults: shown in the help instead of the defaults of the fields.
    """
    types_of, helps = typing.get_type_hints(kind), attribute_docs(kind)
    for field in dataclasses.fields(kind):
        if field.name not in skip:
            default = defaults.get(field.name, field.default)
            options = _kind(field.name, types_of[field.name], field.default)
            help_text = _help(helps.get(field.name, ""), default)
            flags = _flags(prefix + field.name) if prefix else all_flags(field.name)
            group.add_argument(*flags, dest=prefix + field.name, default=None, help=help_text, **options)


def all_flags(name: str) -> list[str]:
    """Return the flag of a setting and its aliases from other engines."""
    return [flag for each in (name, *ALIASES.get(name, ())) for flag in _flags(each)]


def own_flags(action: argparse.Action) -> list[str]:
    """Return the option strings of an action without the aliases of `jaxinfer.config.aliases.ALIASES`."""
    aliases = {flag for alias in ALIASES.get(action.dest, ()) for flag in _flags(alias)}
    aliases |= {f"--no-{flag.removeprefix('--')}" for flag in aliases}
    return [option for option in action.option_strings if option not in aliases]


def given_settings(
    args: argparse.Namespace, kind: type, skip: Collection[str] = (), prefix: str = ""
) -> dict[str, Any]:
    """Return the fields of ``kind`` that were given on the command line (`add_flags`, `add_preset`)."""
    names = [field.name for field in dataclasses.fields(kind) if field.name not in skip]
    values = {name: value for name in names if (value := getattr(args, prefix + name)) is not None}
    if kind is EngineConfig and getattr(args, "preset", None) is not None:
        values["preset"] = args.preset
    return our_settings(
        {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}, names
    )


def attribute_docs(kind: type) -> dict[str, str]:
    """Return the text of each name in the "Attributes:" sections of a class and its bases, on one line each."""
    docs: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        docs |= _section_docs(vars(each).get("__doc__") or "")
    return docs


def _section_docs(docstring: str) -> dict[str, str]:
    section = inspect.cleandoc(docstring).partition("Attributes:\n")[2].partition("\n\n")[0]
    docs: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", section):
        names, colon, text = entry.partition(":")
        if colon:
            docs |= {name.strip(): " ".join(text.split()) for name in names.split(",")}
    return docs


def _flags(name: str) -> list[str]:
    long = f"--{name.replace('_', '-')}"
    return [f"-{name}", long] if len(name) <= _SHORT else [long]


def _help(text: str, default: object) -> str:
    """Append the default, unless the text mentions it or there is none. % is escaped for argparse."""
    plain = text.replace("`", "").replace("%", "%%")
    if default in (None, dataclasses.MISSING, "", ()) or "default" in plain:
        return plain
    if isinstance(default, tuple):
        return f"{plain} (default: {' '.join(map(str, default))})"
    value = {True: "on", False: "off"}.get(default, default) if isinstance(default, bool) else default
    return f"{plain} (default: {value})"


def _kind(name: str, kind: Any, default: object) -> Mapping[str, Any]:
    """Return argparse options for a value of type ``kind``. None in a union means that the flag is optional or, with
    another default, that it may be ``off``."""
    if name == "tensor_parallel_size":
        return {"type": _number_or_auto, "metavar": "N"}
    if isinstance(kind, types.UnionType):
        (kind,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
        if kind is int and default is not None:
            return {"type": _number_or_off, "metavar": "N|off"}
    if kind is bool:
        if name.startswith("enable_") or default is False:
            return {"action": argparse.BooleanOptionalAction}
        return {"type": _switch, "metavar": "on|off", "nargs": "?", "const": True}
    if typing.get_origin(kind) is tuple:
        part = typing.get_args(kind)[0]
        return {"type": whole_number if part is int else part, "nargs": "+", "metavar": _METAVARS.get(part, "NAME")}
    read = {int: whole_number, float: _gibibytes if name.endswith("_gib") else float}.get(kind, kind)
    return {"type": read, "metavar": _METAVARS.get(kind, "NAME")}


def whole_number(text: str) -> int:
    """Parse an integer, optionally with a unit: 32K and 4GiB count in powers of 1024, 32k and 4GB in powers of 1000."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}")
    number, prefix, unit = decimal.Decimal(found[1]), found[2] or "", found[3] or ""
    base = 1000 if unit == "B" or prefix.islower() else 1024
    value = number * base ** ("_KMGT".index(prefix.upper() or "_"))
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(value)


def _gibibytes(text: str) -> float:
    """Parse a number of GiB, or of another unit (512MiB)."""
    return float(text) if _NUMBER.fullmatch(text) else whole_number(text) / 2**30


def _number_or_off(text: str) -> int | str:
    """Parse a number or "off", which stays text for the setting to interpret, because None means an absent flag."""
    return _number_or("off", text)


def _number_or_auto(text: str) -> int | str:
    """Parse a number or "auto", which `our_settings` interprets."""
    return _number_or("auto", text)


def _number_or(word: str, text: str) -> int | str:
    try:
        return text if text == word else whole_number(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {word}") from error


def _switch(text: str) -> bool:
    if text not in _SWITCHES:
        raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")
    return _SWITCHES[text]
