"""Argument parser with one-line errors that suggest the nearest flag, and a short and a long help text."""

from __future__ import annotations

import argparse
import pathlib
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, override

from jaxinfer.cli.flags import own_flags
from jaxinfer.cli.names import our_words
from jaxinfer.config.aliases import ALWAYS, Always, SettingNameError, advice
from jaxinfer.version import __version__

_WIDTH = 100
_PLACES: Mapping[Any, str] = {int: "N", float: "X", pathlib.Path: "PATH"}


class Parser(argparse.ArgumentParser):
    """An `argparse` parser without abbreviated flags, with one-line errors and help of two lengths.

    Args:
        prog: the command as typed.
        examples: whole command lines.
        common: names of the flags that ``--help`` shows; ``--help-all`` shows all.
    """

    def __init__(
        self, prog: str, description: str, examples: Sequence[str] = (), common: Collection[str] = (), **options: Any
    ) -> None:
        super().__init__(prog, description=description, allow_abbrev=False, add_help=False, **options)
        self._examples, self._common = examples, common
        self._always: Mapping[str, Always] = {}
        group = self.add_argument_group("help")
        group.add_argument("-h", "--help", action=_Help, nargs=0, help="show the common options and exit")
        group.add_argument("--help-all", action=_Help, nargs=0, help="show all options and exit")
        group.add_argument(
            "--version", action="version", version=f"jaxinfer {__version__}", help="show the version and exit"
        )

    def add_model(self, default: str | None = None) -> None:
        """Add the model, which can be given without a flag; see `take_model`."""
        what = 'model: "demo", a folder, a .gguf file, or a hub id'
        self.add_argument("named", metavar="MODEL", nargs="?", help=_with_default(what, default))
        self.set_defaults(model_by_default=default)

    def accept_always(self, always: Mapping[str, Always] = ALWAYS) -> None:
        """Accept flags of other engines for what is always so (`jaxinfer.config.aliases.ALWAYS`)."""
        self._always = {**self._always, **always}

    def take_model(self, args: argparse.Namespace) -> None:
        """Set ``args.model`` from the positional argument, the flag, or the default."""
        if args.named is not None and args.model is not None and args.named != args.model:
            self.error(f"MODEL {args.named} and --model {args.model} are two: name one")
        args.model = args.named or args.model or args.model_by_default

    @override
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = [self._dashed(word) for word in (sys.argv[1:] if args is None else args)]
        try:
            ours = our_words(words, self._option_string_actions, self._always)
        except SettingNameError as error:
            self.refuse(str(error))
        flags = [word.partition("=")[0] for word in ours if word.startswith("--")]
        if wrong := [flag for flag in flags if flag not in self._option_string_actions and flag != "--"]:
            self._refuse(wrong)  # before argparse takes a flag's value for an argument
        found, unknown = self.parse_known_args(ours, namespace)
        if unknown:
            self._refuse(unknown)
        return found

    @override
    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Filter argparse's matches: it takes ``-t 2`` for ``-tp 2``, and disables abbreviations of long flags only.
        The correct matches are one-letter flags followed by their value (``-n3``)."""
        found: list[Any] = super()._get_option_tuples(option_string)
        return [each for each in found if each[1] == option_string[:2]]

    @override
    def error(self, message: str) -> NoReturn:
        plain = re.sub(r"^argument ([^:/ ]+)[^:]*:", r"\1:", " ".join(message.split()))
        self.exit(2, f"error: {plain} ({self.prog} --help)\n")

    def refuse(self, sentence: str) -> NoReturn:
        """End the command for an invalid value, without a reference to --help."""
        self.exit(2, f"error: {sentence}\n")

    @override
    def format_help(self) -> str:
        """Return the help of all flags, in their groups."""
        groups = [(group.title or "", group._group_actions) for group in self._action_groups]
        return self._page(groups, _WholeFormatter, [])

    def format_short_help(self) -> str:
        """Return the help of the common options."""
        flags = [action for action in self._actions if action.option_strings and action.help != argparse.SUPPRESS]
        usual = [action for action in flags if action.dest in self._common]
        groups = [("arguments", self._get_positional_actions()), ("common options", usual)]
        return self._page(groups, _Formatter, [f"--help-all shows all {len(flags)} options."])

    def _page(
        self, groups: Iterable[tuple[str, list[argparse.Action]]], kind: type[_Formatter], end: Sequence[str]
    ) -> str:
        formatter = kind(self.prog)
        formatter.add_usage("%(prog)s" + self._arguments(), [], [])
        formatter.add_text(self.description)
        for title, actions in groups:
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        examples = ["\nexamples:", *(f"  {line}" for line in self._examples)] if self._examples else []
        return "\n".join([formatter.format_help().rstrip(), *examples, *(["", *end] if end else []), ""])

    def _arguments(self) -> str:
        names = [(action.metavar or action.dest, action.nargs) for action in self._get_positional_actions()]
        return "".join(f" [{name}]" if nargs == "?" else f" {name}" for name, nargs in names) + " [--FLAG VALUE ...]"

    def _dashed(self, word: str) -> str:
        """Return a flag with dashes if it was given with underscores, as the setting: --max_model_len."""
        flag, equals, value = word.partition("=")
        dashed = flag.replace("_", "-")
        return dashed + equals + value if flag.startswith("--") and dashed in self._option_string_actions else word

    def _refuse(self, words: Sequence[str]) -> NoReturn:
        flag = next((word for word in words if word.startswith("-")), words[0]).partition("=")[0]
        if not flag.startswith("-"):
            self.error(f"{flag} is one word too many")
        own = [option for action in self._actions for option in own_flags(action)]
        said = self._advice(flag, own) or self._advice(flag, self._option_string_actions)
        self.error(f"{flag} is not a flag of {self.prog}" + (f": {said}" if said else ""))

    @staticmethod
    def _advice(flag: str, options: Iterable[str]) -> str:
        known = {option.lstrip("-").replace("-", "_"): option for option in options}
        return advice(flag.lstrip("-").replace("-", "_"), known, known.__getitem__)


class _Help(argparse.Action):
    """Print one of the two help texts, and exit."""

    @override
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        sys.stdout.write(parser.format_help() if option_string == "--help-all" else parser.format_short_help())
        parser.exit()


class _Formatter(argparse.HelpFormatter):
    """Formatter that shows one name per flag, without aliases."""

    def __init__(self, prog: str) -> None:
        width = min(_WIDTH, shutil.get_terminal_size().columns - 2)
        super().__init__(prog, max_help_position=32, width=width)

    @override
    def _get_help_string(self, action: argparse.Action) -> str:
        """Append the default, unless the text mentions it or there is none."""
        text, default = action.help or "", action.default
        if "default" in text or default is None or default is False or default in ("", [], argparse.SUPPRESS):
            return text
        return f"{text} (default: %(default){'g' if isinstance(default, float) else 's'})"

    @override
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)  # do not split flags

    @override
    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return str(action.metavar or action.dest)
        own = own_flags(action)
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{own[0].removeprefix('--')}"
        value = "" if action.nargs == 0 else f" {self._format_args(action, _PLACES.get(action.type, 'VALUE'))}"
        return ", ".join(own) + value


class _WholeFormatter(_Formatter):
    """Formatter that also shows the aliases from other engines."""

    @override
    def _get_help_string(self, action: argparse.Action) -> str:
        others = [option for option in action.option_strings if option not in own_flags(action)]
        positive = [option for option in others if not option.startswith("--no-")]
        return super()._get_help_string(action) + (f" [also {', '.join(positive)}]" if positive else "")


def _with_default(text: str, default: str | None) -> str:
    return text if default is None else f"{text} (default: {default})"
