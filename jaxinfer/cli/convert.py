"""Flags of `jaxinfer convert`."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from jaxinfer.cli.engine import add_dtype
from jaxinfer.cli.parser import Parser

FORMATS = ("orbax", "safetensors")
METHODS = ("int8", "fp8", "smoothquant", "int4", "mxfp4", "gptq", "awq", "nf4", "fp4")

_COMMON = ("dtype", "output_format", "check_finite", "quantize", "calibration", "group_size")
_EXAMPLES = (
    "jaxinfer convert path/to/folder converted",
    "jaxinfer convert path/to/folder smaller --quantize int8",
    "jaxinfer convert path/to/folder smaller --quantize gptq --calibration text.txt",
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags; quantisation flags that were not given are None."""
    args: argparse.Namespace = make_parser().parse_args(argv)
    return args


def make_parser() -> Parser:
    """Return the parser."""
    about = "Convert a model to the format that loads fastest, or to safetensors, and optionally quantise it."
    parser = Parser("jaxinfer convert", about, _EXAMPLES, _COMMON)
    parser.add_argument("source", metavar="SRC", help='model: "demo", a folder, a .gguf file, or a hub id')
    parser.add_argument("destination", metavar="DST", type=pathlib.Path, help="output folder, which must not exist")
    group = parser.add_argument_group("output")
    add_dtype(group)
    group.add_argument("--output-format", choices=FORMATS, default="orbax", help="output format")
    group.add_argument("--check-finite", action="store_true", help="reject weights with NaN or infinity")
    _add_quantisation(parser.add_argument_group("quantisation (docs/quantisation.md)"))
    return parser


def _add_quantisation(group: argparse._ArgumentGroup) -> None:
    switch = argparse.BooleanOptionalAction
    group.add_argument("--quantize", choices=METHODS, help="quantisation method of the weights")
    text = "calibration text, or .jsonl with texts; built-in: a text of 20 kB, for trials"
    group.add_argument("--calibration", "--calibration-data", metavar="FILE", help=text)
    group.add_argument("--samples", type=int, default=512, metavar="N", help="calibration samples (default: 512)")
    group.add_argument("--sequence-length", type=int, default=512, metavar="N", help="tokens per sample (default: 512)")
    group.add_argument("--bits", type=int, metavar="N", help="int4, gptq, awq: bits per weight (default: 4)")
    group.add_argument("--group-size", type=int, metavar="N", help="inputs per scale; -1: all inputs (default: 128)")
    group.add_argument("--symmetric", action=switch, help="symmetric: no zero points (default: on, except for awq)")
    group.add_argument("--activations", action="store_true", default=None, help="int8, fp8: also quantise activations")
    group.add_argument("--blocks", action="store_true", default=None, help="fp8: one scale per 128 x 128 block")
    damp = "gptq: damping, as a fraction of the mean diagonal of the Hessian (default: 0.01)"
    group.add_argument("--damp", type=float, metavar="X", help=damp)
    group.add_argument("--act-order", action="store_true", default=None, help="gptq: quantise the largest inputs first")
    group.add_argument("--static-groups", action="store_true", default=None, help="gptq: groups of neighbouring inputs")
    alpha = "smoothquant: migration strength from activations to weights (default: 0.5)"
    group.add_argument("--alpha", type=float, metavar="X", help=alpha)
    group.add_argument("--clip", action=switch, help="awq: clip the weights of each group (default: on)")
    group.add_argument("--nested", action=switch, help="nf4, fp4: quantise the scales to 8 bits (default: on)")
    group.add_argument("--short-groups", action="store_true", default=None, help="allow a shorter last group")
    group.add_argument("--weight-format", metavar="FORMAT", help="checkpoint format: compressed-tensors, gptq or awq")
