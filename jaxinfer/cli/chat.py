"""Flags of `jaxinfer chat`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxinfer.cli.engine import add_engine, add_sampling, engine_settings, sampling_settings
from jaxinfer.cli.parser import Parser

_COMMON = ("system", "max_tokens", "temperature", "top_p", "seed", "max_model_len", "stats", "tensor_parallel_size")
_EXAMPLES = ("jaxinfer chat demo", 'jaxinfer chat path/to/folder --system "Answer in one sentence."')


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags; see `jaxinfer.cli.generate.parse`."""
    parser = make_parser()
    args = parser.parse_args(argv)
    parser.take_model(args)
    args.settings, args.sampling = engine_settings(parser, args), sampling_settings(args)
    return args


def make_parser() -> Parser:
    """Return the parser."""
    about = "Chat with a model in the terminal. Ctrl-C stops an answer, Ctrl-D ends the chat; /help lists the commands."
    parser = Parser("jaxinfer chat", about, _EXAMPLES, _COMMON)
    group = parser.add_argument_group("conversation")
    add_system(group)
    add_stats(group)
    add_sampling(parser)
    add_engine(parser, "1")
    return parser


def add_system(group: argparse._ArgumentGroup) -> None:
    """Add ``--system`` and ``--chat-template``."""
    group.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    template = "chat template that replaces the model's: a file, or the template itself"
    group.add_argument("--chat-template", metavar="FILE|TEXT", help=template)


def add_stats(group: argparse._ArgumentGroup) -> None:
    """Add ``--stats``."""
    group.add_argument("--stats", action="store_true", help="print seeds, TTFT, TPOT, tokens/s, memory bandwidth")
