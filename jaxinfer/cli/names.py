"""Command lines of other engines: their flags become jaxinfer's, before they are parsed."""

from __future__ import annotations

import argparse
import collections
import itertools
import re
from collections.abc import Mapping, Sequence

from jaxinfer.config.aliases import (
    ALWAYS,
    HINTS,
    SWITCHES,
    Always,
    SettingNameError,
    require_always,
    speculative_settings,
)

_SPECULATIVE = "speculative_config"
Options = Mapping[str, argparse.Action]


def our_words(words: Sequence[str], options: Options, always: Mapping[str, Always] = ALWAYS) -> list[str]:
    """Return the words of a command line with flags of `SWITCHES` and ``--speculative-config`` as ours, and without
    those of ``always``.

    Args:
        options: actions by option string. Flags that are among them stay.

    Raises:
        SettingNameError: a flag has a value that it cannot have here, or two names of a flag have different values.
    """
    found, left = list[str](), collections.deque(words)
    while left:
        word = left.popleft()
        flag, equals, value = word.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        if not flag.startswith("-") or flag in options:
            found.append(word)
        elif name in SWITCHES and (action := options.get(f"--{SWITCHES[name][0].replace('_', '-')}")) is not None:
            found += _switched(action, SWITCHES[name][1])
        elif name == _SPECULATIVE and f"--{_SPECULATIVE.removesuffix('_config')}" in options:
            settings = speculative_settings(value if equals or not left else left.popleft())
            found += [part for ours, own in settings.items() for part in (f"--{ours.replace('_', '-')}", str(own))]
        elif name.removeprefix("no_") in always or name in always:
            _require(name, value if equals else None, left, always)
        else:  # -ctk is no flag -c with a value
            found.append(f"-{word}" if name in HINTS and len(name) > 1 and not word.startswith("--") else word)
    _require_one_value(found, options)
    return found


def _switched(action: argparse.Action, on: bool | str) -> list[str]:
    flag = action.option_strings[0]
    if isinstance(on, str):
        return [flag, on]
    if isinstance(action, argparse.BooleanOptionalAction):
        return [flag if on else f"--no-{flag.removeprefix('--')}"]
    return [flag, "on" if on else "off"]


def _require(name: str, value: str | None, left: collections.deque[str], always: Mapping[str, Always]) -> None:
    """Take the value of a flag from the words that are left, if it has one, and require that it has it here."""
    if name not in always:
        return require_always(name.removeprefix("no_"), False, always)
    values = always[name].values
    if value is None and left and not left[0].startswith("-"):
        is_switch = re.fullmatch(values, "true") is not None
        value = left.popleft() if not is_switch or re.fullmatch(values, left[0].lower()) else None
    return require_always(name, True if value is None else value, always)


def _require_one_value(words: Sequence[str], options: Options) -> None:
    """Raise SettingNameError if a setting is given under two names with different values."""
    given: dict[str, tuple[str, str]] = {}
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        action = options.get(flag)
        if action is None or isinstance(action, argparse._AppendAction) or action.nargs == 0:
            if not isinstance(action, argparse.BooleanOptionalAction):
                continue
            flag, value = (f"--{flag[5:]}", "off") if flag.startswith("--no-") else (flag, "on")
        elif not equals:
            after = itertools.takewhile(lambda each: each not in options, words[place + 1 :])
            value = " ".join(itertools.islice(after, 1 if action.nargs is None else None))
        before, other = given.setdefault(action.dest, (flag, value))
        if before != flag and other != value:
            raise SettingNameError(f"{before} {other} and {flag} {value} are one setting")
