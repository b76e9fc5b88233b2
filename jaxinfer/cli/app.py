"""Dispatcher of the `jaxinfer` subcommands: `jaxinfer serve`, `jaxinfer generate` and the rest."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Sequence

from jaxinfer.cli.interrupts import INTERRUPTED, leaving_at_once, show_cursor, until_cut_off
from jaxinfer.config.aliases import advice
from jaxinfer.version import __version__


@dataclasses.dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        summary: one line for the list.
        flags: the module with ``parse(argv)`` for its flags. It is imported first, and is light.
        work: the module with ``run(args)``, which runs it and returns the exit code; ``args.work`` names another one.
    """

    summary: str
    flags: str
    work: str


COMMANDS = {
    "serve": Command("serve a model over gRPC and HTTP", "jaxinfer.cli.serve", "jaxinfer.serve.__main__"),
    "generate": Command("generate text offline", "jaxinfer.cli.generate", "jaxinfer.terminal.complete"),
    "chat": Command("chat with a model in the terminal", "jaxinfer.cli.chat", "jaxinfer.terminal.chat"),
    "bench": Command("benchmark a server or an engine", "jaxinfer.bench.commands", "jaxinfer.bench.__main__"),
    "convert": Command("convert a model for fast loading, or quantise it", "jaxinfer.cli.convert", "jaxinfer.convert"),
    "compile": Command("compile a server's programs ahead of time", "jaxinfer.cli.compile", "jaxinfer.compile"),
    "control": Command("stats, drain, abort, flush of a server", "jaxinfer.cli.control", "jaxinfer.terminal.control"),
    "keys": Command("create API keys for a server", "jaxinfer.serve.keys", "jaxinfer.serve.keys"),
    "eval": Command("measure the perplexity of a text", "jaxinfer.cli.eval", "jaxinfer.eval.__main__"),
    "check-on-policy": Command(
        "compare served log-probabilities with a trainer's", "jaxinfer.cli.check_on_policy", "jaxinfer.check_on_policy"
    ),
    "check-gpu": Command("check and time the GPU", "jaxinfer.gpu_check.__main__", "jaxinfer.gpu_check.__main__"),
    "version": Command("versions of jaxinfer and its dependencies", "jaxinfer.cli.version", "jaxinfer.cli.version"),
}

_EXAMPLES = """
jaxinfer generate demo --prompt "ROMEO:"
jaxinfer chat path/to/folder
jaxinfer serve path/to/folder
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `jaxinfer` command and return its exit code."""
    return until_cut_off(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "--help"
    if name in ("-h", "--help", "help"):
        print(overview())
        return 0
    if name == "--version":
        print(f"jaxinfer {__version__}")
        return 0
    if name not in COMMANDS:
        near = advice(name, COMMANDS)
        print(f"error: {name} is not a command of jaxinfer{near and f': {near}'} (--help lists them)", file=sys.stderr)
        return 2
    return _run(name, words[1:])


def run(name: str, argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    return until_cut_off(lambda: _run(name, argv))


def _run(name: str, argv: Sequence[str] | None) -> int:
    """Run a subcommand. Its modules are imported here, where Ctrl-C leaves no traceback."""
    command = COMMANDS[name]
    try:
        with leaving_at_once():
            args = importlib.import_module(command.flags).parse(argv)
            work = importlib.import_module(getattr(args, "work", command.work))
        code: int = work.run(args)
    except SystemExit as left:  # --help, --version, and invalid flags
        code = left.code if isinstance(left.code, int) else 0
    except KeyboardInterrupt:
        show_cursor()
        code = INTERRUPTED
    return code


def overview() -> str:
    """Return the text of `jaxinfer --help`."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    examples = [f"  {line}" for line in _EXAMPLES.strip().splitlines()]
    first = "usage: jaxinfer COMMAND ...\n\nLLM inference and serving in JAX.\n\ncommands:"
    return "\n".join([first, *rows, "\nexamples:", *examples, "\njaxinfer COMMAND --help shows its options."])
