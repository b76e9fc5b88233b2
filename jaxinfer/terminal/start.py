"""Start of an interactive engine: errors are one sentence, and Ctrl-C during loading ends the program."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable

from jaxinfer.cli.interrupts import leaving_at_once
from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.llm import LLM
from jaxinfer.lora.store import LoRAError
from jaxinfer.opening import LOADING_ERRORS
from jaxinfer.sampling_params import RequestError, SamplingParams

ERRORS = (*LOADING_ERRORS, EngineConfigError, LoRAError, RequestError)


def in_one_sentence(command: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], int]:
    """Wrap a command to return its exit code: 2, with one sentence on stderr, for an expected error."""

    @functools.wraps(command)
    def run(args: argparse.Namespace) -> int:
        try:
            command(args)
        except ERRORS as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0

    return run


def start(args: argparse.Namespace, sequences: int) -> tuple[LLM, SamplingParams]:
    """Start an engine; return it with the requests' sampling parameters. ``sequences``: default of max_num_seqs."""
    with leaving_at_once():
        llm = LLM(
            args.model,
            args.dtype,
            family=args.family,
            chat_template=args.chat_template,
            config=EngineConfig(**{"max_num_seqs": sequences, **args.settings}),
            check_finite=args.check_finite,
            compilation_cache_dir=args.compilation_cache_dir,
        )
    return llm, llm.default_sampling_params(**args.sampling)
