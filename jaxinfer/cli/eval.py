"""Flags of `jaxinfer eval`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxinfer.cli.engine import add_engine, engine_settings
from jaxinfer.cli.parser import Parser

LONGEST = 1024
"""Default tokens of a window, unless the context is shorter."""

_COMMON = ("max_length", "stride", "json", "dtype", "kv_cache_dtype", "tensor_parallel_size")
_EXAMPLES = (
    "jaxinfer eval perplexity FILE path/to/folder",
    "jaxinfer eval perplexity FILE demo --max-length 512 --stride 256 --kv-cache-dtype int8",
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags; ``settings`` are the given engine settings."""
    parser = make_parser()
    args = parser.parse_args(argv)
    parser.take_model(args)
    args.settings = engine_settings(parser, args)
    return args


def make_parser() -> Parser:
    """Return the parser."""
    parser = Parser("jaxinfer eval", "Perplexity of a text, computed by the serving engine.", _EXAMPLES, _COMMON)
    parser.add_argument("measure", choices=("perplexity",), metavar="perplexity", help="over windows of fixed length")
    parser.add_argument("file", metavar="FILE", help="UTF-8 text file (-: stdin)")
    group = parser.add_argument_group("windows and output")
    length = f"tokens per window (default: {LONGEST}, or the context length if shorter)"
    group.add_argument("--max-length", type=int, metavar="N", help=length)
    group.add_argument("--stride", type=int, metavar="N", help="tokens between window starts (default: half a window)")
    group.add_argument("--json", action="store_true", help="print the results as one line of JSON")
    add_engine(parser, "chosen by the engine")
    return parser
