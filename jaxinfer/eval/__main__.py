"""`jaxinfer eval perplexity`: perplexity of a text under a model as it is served."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

from jaxinfer.cli.app import run as run_command
from jaxinfer.cli.eval import LONGEST
from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.eval.perplexity import Perplexity, measure
from jaxinfer.llm import LLM
from jaxinfer.opening import LOADING_ERRORS
from jaxinfer.sampling_params import RequestError
from jaxinfer.weights.progress import counting_bar

ERRORS = (*LOADING_ERRORS, EngineConfigError, RequestError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; see `run`."""
    return run_command("eval", arguments)


def run(args: argparse.Namespace) -> int:
    """Return exit code 0, or 2 with one sentence on stderr for an error."""
    try:
        _print(args, _perplexity(args))
    except ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _perplexity(args: argparse.Namespace) -> Perplexity:
    text = _text(args.file)
    llm = LLM(
        args.model,
        args.dtype,
        config=EngineConfig(**args.settings),
        check_finite=args.check_finite,
        compilation_cache_dir=args.compilation_cache_dir,
    )
    if llm.tokenizer is None:
        raise RequestError(None, f"the model {args.model!r} has no tokenizer")
    length = min(LONGEST, llm.engine.config.max_model_len - 1) if args.max_length is None else args.max_length
    stride = max(1, length // 2) if args.stride is None else args.stride
    with counting_bar("windows") as progress:
        return measure(llm, llm.tokenizer.encode(text), length, stride, progress)


def _text(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else pathlib.Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(None, f"{file} cannot be read: {error}") from error


def _print(args: argparse.Namespace, found: Perplexity) -> None:
    if args.json:
        print(json.dumps({"perplexity": found.perplexity, **dataclasses.asdict(found), "model": args.model}))
        return
    print(f"perplexity {found.perplexity:.4f} of {args.file} under {args.model}")
    print(
        f"loss {found.loss:.4f} nats a token, over {found.scored} of {found.tokens} tokens in {found.windows} windows "
        f"of {found.max_length}, stride {found.stride}"
    )


if __name__ == "__main__":
    sys.exit(main())
