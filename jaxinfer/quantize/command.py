"""Quantisation flags of `jaxinfer convert`."""

from __future__ import annotations

import argparse
import dataclasses

from jaxinfer.opening import model_folder
from jaxinfer.quant.make.recipe import Recipe, RecipeError
from jaxinfer.quantize.calibration import Calibration, read_calibration
from jaxinfer.quantize.driver import quantize
from jaxinfer.quantize.summary import Summary
from jaxinfer.text import load_tokenizer
from jaxinfer.weights.load import Progress

_FLAGS = {field.name for field in dataclasses.fields(Recipe)} - {"method"}


def recipe_of(args: argparse.Namespace) -> Recipe | None:
    """Return the recipe of the flags; None if no quantisation is requested.

    Raises:
        RecipeError: flags are inconsistent.
    """
    settings = {name: getattr(args, name) for name in _FLAGS if getattr(args, name) is not None}
    if args.quantize is None:
        if settings or args.calibration is not None:
            raise RecipeError("flags of quantisation need --quantize")
        return None
    return Recipe(args.quantize, **settings)


def run(args: argparse.Namespace, recipe: Recipe, progress: Progress | None) -> Summary:
    """Quantise ``args.source`` into ``args.destination``.

    Raises:
        CheckpointError, ConfigError, TokenizerError, RecipeError: one sentence with the cause.
        OSError: the destination cannot be written.
    """
    return quantize(
        args.source,
        args.destination,
        recipe,
        _calibration(args) if recipe.calibrated else None,
        args.dtype,
        progress,
        check_finite=args.check_finite,
        output_format=args.output_format,
    )


def _calibration(args: argparse.Namespace) -> Calibration:
    if args.samples < 1 or args.sequence_length < 2:
        raise RecipeError("--samples must be at least 1 and --sequence-length at least 2")
    if args.calibration is None:
        needs = f"{args.samples} samples of {args.sequence_length} tokens, like that which will be served"
        raise RecipeError(f"{args.quantize} needs a text, --calibration FILE, of {needs}; built-in is for trials")
    tokenizer = load_tokenizer(model_folder(args.source))
    return read_calibration(args.calibration, tokenizer, args.samples, args.sequence_length)
