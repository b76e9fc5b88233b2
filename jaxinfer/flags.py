"""Command-line flags made of a configuration's fields: name, type, default and help stand in the dataclass alone."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

_SWITCHES = {"on": True, "off": False}


def add_flags(group: argparse._ArgumentGroup, kind: type, skip: Collection[str] = (), prefix: str = "") -> None:
    """A flag for each field of the dataclass ``kind`` but those in ``skip``; what is not given is None.

    ``enable_x`` becomes ``--enable-x`` and ``--no-enable-x``, and so does a truth value that is false by default; any
    other takes ``on`` or ``off``. ``prefix``: what all flags begin with.
    """
    types_of, helps = typing.get_type_hints(kind), attribute_docs(kind)
    for field in dataclasses.fields(kind):
        if field.name not in skip:
            described = _help(helps.get(field.name, ""), field.default)
            options = _kind(field.name, types_of[field.name], field.default)
            group.add_argument(_flag(prefix + field.name), default=None, help=described, **options)


def given_settings(
    args: argparse.Namespace, kind: type, skip: Collection[str] = (), prefix: str = ""
) -> dict[str, Any]:
    """The fields of ``kind`` that were given on the command line; see `add_flags`."""
    names = [field.name for field in dataclasses.fields(kind) if field.name not in skip]
    values = {name: value for name in names if (value := getattr(args, prefix + name)) is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def attribute_docs(kind: type) -> dict[str, str]:
    """Read the "Attributes:" sections of a class and its bases: of each name its text, in one line."""
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


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _help(text: str, default: object) -> str:
    """Add the default, unless the text speaks of it. argparse takes % for its own."""
    plain = text.replace("`", "").replace("%", "%%")
    if default is None or "default" in plain:
        return plain
    value = {True: "on", False: "off"}.get(default, default) if isinstance(default, bool) else default
    return f"{plain} (default: {value})"


def _kind(name: str, kind: Any, default: object) -> Mapping[str, Any]:
    """argparse's options for a value of type ``kind``; None in a union only means that it may be left out."""
    if isinstance(kind, types.UnionType):
        (kind,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
    if kind is bool:
        if name.startswith("enable_") or default is False:
            return {"action": argparse.BooleanOptionalAction}
        return {"type": _switch, "metavar": "on|off"}
    if typing.get_origin(kind) is tuple:
        return {"type": typing.get_args(kind)[0], "nargs": "+"}
    return {"type": kind}


def _switch(text: str) -> bool:
    if text not in _SWITCHES:
        raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")
    return _SWITCHES[text]
