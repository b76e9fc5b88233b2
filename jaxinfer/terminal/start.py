"""A model for a person who waits: its errors are one sentence, and Ctrl-C while it loads ends the program."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable

from jaxinfer.cli.interrupts import leaving_at_once
from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.llm import LLM
from jaxinfer.loading import LOADING_ERRORS
from jaxinfer.lora.store import LoRAError
from jaxinfer.sampling_params import RequestError, SamplingParams

ERRORS = (*LOADING_ERRORS, EngineConfigError, LoRAError, RequestError)


def in_one_sentence(command: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], int]:
    """Make of a command one that returns its exit code: 2, with a sentence on stderr, for what cannot be."""

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
    """The model with its engine, and the parameters of its requests; ``sequences``: unless flags say how many."""
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
