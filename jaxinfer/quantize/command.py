"""The flags of `python -m jaxinfer.convert` that concern quantisation."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys

from jaxinfer.loading import model_folder
from jaxinfer.quant.make.recipe import METHODS, Recipe, RecipeError
from jaxinfer.quantize.calibration import BUILT_IN, Calibration, read_calibration
from jaxinfer.quantize.driver import quantize
from jaxinfer.text import load_tokenizer
from jaxinfer.weights.load import Progress

_FLAGS = {field.name for field in dataclasses.fields(Recipe)} - {"method"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("quantisation (docs/quantisation.md)")
    group.add_argument("--quantize", choices=tuple(METHODS), help="how weights are quantised")
    text = "sample text, or .jsonl with texts (default: a built-in one)"
    group.add_argument("--calibration", type=pathlib.Path, metavar="FILE", help=text)
    group.add_argument("--samples", type=int, default=128, help="of the calibration (default: %(default)s)")
    group.add_argument("--sequence-length", type=int, default=512, help="of a sample (default: %(default)s)")
    group.add_argument("--bits", type=int, help="of int4, gptq and awq (default: 4)")
    group.add_argument("--group-size", type=int, help="inputs that share a scale, -1: all (default: 128)")
    group.add_argument("--symmetric", action=argparse.BooleanOptionalAction, help="no zero points (default: but awq)")
    group.add_argument("--activations", action="store_true", default=None, help="int8, fp8: round inputs, too")
    group.add_argument("--blocks", action="store_true", default=None, help="fp8: a scale for 128 by 128 weights")
    group.add_argument("--damp", type=float, help="gptq: share of the mean diagonal that is added (default: 0.01)")
    group.add_argument("--act-order", action="store_true", default=None, help="gptq: the largest inputs first")
    group.add_argument("--static-groups", action="store_true", default=None, help="gptq: groups are of neighbours")
    group.add_argument("--alpha", type=float, help="smoothquant: what weights take over (default: 0.5)")
    group.add_argument("--clip", action=argparse.BooleanOptionalAction, help="awq: limit weights (default: yes)")
    group.add_argument("--nested", action=argparse.BooleanOptionalAction, help="nf4, fp4: 8-bit scales (default: yes)")
    group.add_argument("--short-groups", action="store_true", default=None, help="the last group may be a shorter one")
    group.add_argument("--weight-format", metavar="FORMAT", help="compressed-tensors, gptq or awq")


def recipe_of(args: argparse.Namespace) -> Recipe | None:
    """Make a recipe of the flags of `add_flags`; None: nothing is to be quantised.

    Raises:
        RecipeError: flags do not go together.
    """
    settings = {name: getattr(args, name) for name in _FLAGS if getattr(args, name) is not None}
    if args.quantize is None:
        if settings or args.calibration is not None:
            raise RecipeError("flags of quantisation need --quantize")
        return None
    return Recipe(args.quantize, **settings)


def run(args: argparse.Namespace, recipe: Recipe, progress: Progress | None) -> None:
    """Quantises ``args.source`` into ``args.destination``; what stays as it is is said on stderr.

    Raises:
        CheckpointError, ConfigError, TokenizerError, RecipeError: one sentence that says what is wrong.
        OSError: the destination cannot be written.
    """
    quantize(
        args.source,
        args.destination,
        recipe,
        _calibration(args) if recipe.calibrated else None,
        args.dtype,
        progress,
        _report,
        check_finite=args.check_finite,
        output_format=args.output_format,
    )


def _calibration(args: argparse.Namespace) -> Calibration:
    if args.samples < 1 or args.sequence_length < 2:
        raise RecipeError("--samples must be at least 1 and --sequence-length at least 2")
    tokenizer = load_tokenizer(model_folder(args.source))
    read = read_calibration(args.calibration or BUILT_IN, tokenizer, args.samples, args.sequence_length)
    if args.calibration is None:
        samples, length = read.tokens.shape
        _report(
            f"calibrated on {samples} samples of {length} tokens of the built-in text: "
            "--calibration FILE with text like that which will be served is better"
        )
    return read


def _report(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")
