"""Flags of `jaxinfer serve`."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxinfer.cli.flags import add_flags, add_groups, add_preset, given_settings
from jaxinfer.cli.parser import Parser
from jaxinfer.config import EngineConfig
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.settings import LIMIT, ServeConfig, ServeConfigError, make_config, read_settings

_NESTED = ("limits", "engine")

_COMMON = ("config", "host", "http_port", "grpc_port", "api_keys", "max_model_len", "max_num_seqs", "kv_cache_dtype")
_MORE = ("memory_utilization", "tensor_parallel_size")
_EXAMPLES = (
    "jaxinfer serve demo",
    "jaxinfer serve path/to/folder --host 0.0.0.0 --api-keys keys.yaml",
    "jaxinfer serve --config configs/deployments/production.yaml",
)
_ABOUT = """Serve a model over gRPC and HTTP. Flags override the settings of --config. On SIGTERM or Ctrl-C the server
drains: it exits when its requests have finished, after --drain-seconds at the latest; a second signal aborts them."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags; ``configuration`` combines the file and the flags. An invalid setting ends the command."""
    parser = make_parser()
    args = parser.parse_args(argv)
    parser.take_model(args)
    try:
        args.configuration = make_config(*layers(args))
    except ServeConfigError as error:
        parser.refuse(str(error))
    return args


def make_parser() -> Parser:
    """Return the parser."""
    parser = Parser("jaxinfer serve", _ABOUT, _EXAMPLES, (*_COMMON, *_MORE))
    parser.add_model()
    file = parser.add_argument_group("config file")
    file.add_argument("--config", type=pathlib.Path, help="YAML file of settings; configs/deployments has examples")
    add_groups(parser, ServeConfig, skip=_NESTED)
    add_flags(parser.add_argument_group("per-request limits"), ServeLimits, prefix=LIMIT)
    add_preset(parser)
    add_groups(parser, EngineConfig)
    parser.accept_always()
    return parser


def layers(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the settings of the file, if one is given, and those of the flags."""
    flags = given_settings(args, ServeConfig, skip=_NESTED)
    flags["limits"] = given_settings(args, ServeLimits, prefix=LIMIT)
    flags["engine"] = given_settings(args, EngineConfig)
    return [flags] if args.config is None else [read_settings(args.config), flags]
