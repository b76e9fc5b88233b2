"""Flags of `jaxinfer compile`."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from jaxinfer.cli.engine import add_dtype, add_model_flag
from jaxinfer.cli.flags import add_groups, add_preset, given_settings
from jaxinfer.cli.parser import Parser
from jaxinfer.config import EngineConfig, EngineConfigError, check

THIS = "this"
GPUS = ("h100", "h200", "a100")
FOLDER = "compiled"
"""Folder of the compiled programs within the model folder."""

_COMMON = ("target", "compilation_cache_dir", "dtype", "max_model_len", "max_num_seqs", "num_pages")
_EXAMPLES = (
    "jaxinfer compile path/to/folder --max-num-seqs 32",
    "jaxinfer compile path/to/folder --target h100 --num-pages 6500",
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags; ``settings`` are the given engine settings, ``argv`` is the parsed command line."""
    parser, words = make_parser(), list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(words)
    parser.take_model(args)
    if args.model is None:
        parser.error("no model is named: jaxinfer compile MODEL")
    if args.target != THIS and args.num_pages is None:
        parser.refuse(f"--target {args.target} needs --num-pages: on the GPU its free memory decides")
    args.settings, args.argv = given_settings(args, EngineConfig), words
    try:
        check(EngineConfig(**args.settings))
    except EngineConfigError as error:
        parser.refuse(str(error))
    return args


def make_parser() -> Parser:
    """Return the parser."""
    about = "Compile every program of a server with the same flags, ahead of its first start."
    parser = Parser("jaxinfer compile", about, _EXAMPLES, _COMMON)
    parser.add_model()
    group = parser.add_argument_group("target and output")
    add_model_flag(group)
    add_dtype(group)
    target = "device to compile for: this machine's, or a GPU that need not be present"
    group.add_argument("--target", choices=(THIS, *GPUS), default=THIS, help=target)
    where = f"folder of the compiled programs (default: {FOLDER} in the model's folder)"
    group.add_argument("--compilation-cache-dir", metavar="DIR", help=where)
    plugins = "folder of JAX's CUDA plugin, for a GPU that is not present"
    group.add_argument("--plugins", type=pathlib.Path, metavar="DIR", help=plugins)
    group.add_argument("--prepared", action="store_true", help=argparse.SUPPRESS)
    add_preset(parser)
    add_groups(parser, EngineConfig)
    parser.accept_always()
    return parser
