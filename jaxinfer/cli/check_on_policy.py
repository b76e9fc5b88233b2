"""Flags of `jaxinfer check-on-policy`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxinfer.cli.engine import add_engine, engine_settings
from jaxinfer.cli.flags import whole_number
from jaxinfer.cli.parser import Parser

_COMMON = ("sequences", "max_tokens", "json", "dtype", "max_num_seqs", "tensor_parallel_size")
_EXAMPLES = (
    "jaxinfer check-on-policy demo",
    "jaxinfer check-on-policy path/to/folder --tensor-parallel-size 4 --sequences 256",
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags; ``settings`` are the given engine settings."""
    parser = make_parser()
    args = parser.parse_args(argv)
    parser.take_model(args)
    for name in ("sequences", "max_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    args.settings = engine_settings(parser, args)
    return args


def make_parser() -> Parser:
    """Return the parser."""
    what = "Compare served log-probabilities with those of a training step, to the last bit."
    parser = Parser("jaxinfer check-on-policy", what, _EXAMPLES, _COMMON)
    group = parser.add_argument_group("sequences and output")
    add = group.add_argument
    add("--sequences", type=whole_number, default=64, metavar="N", help="sequences to generate (default: 64)")
    add("--max-tokens", type=whole_number, default=32, metavar="N", help="tokens of each sequence (default: 32)")
    add("--seed", type=whole_number, default=0, metavar="N", help="seed of prompts and samples (default: 0)")
    add("--json", action="store_true", help="print the result as one line of JSON")
    add_engine(parser, "chosen by the engine")
    return parser
