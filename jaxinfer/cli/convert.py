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
    about = "Write a model's folder in the form in which it loads fastest, or as safetensors, quantised if asked for."
    parser = Parser("jaxinfer convert", about, _EXAMPLES, _COMMON)
    parser.add_argument("source", metavar="SRC", help='"demo", a model\'s folder, a .gguf file, or a hub id')
    parser.add_argument("destination", metavar="DST", type=pathlib.Path, help="a folder that does not exist")
    group = parser.add_argument_group("the folder")
    add_dtype(group)
    group.add_argument("--output-format", choices=FORMATS, default="orbax", help="(default: %(default)s)")
    group.add_argument("--check-finite", action="store_true", help="refuse weights with NaN or infinity")
    _add_quantisation(parser.add_argument_group("quantisation (docs/quantisation.md)"))
    return parser


def _add_quantisation(group: argparse._ArgumentGroup) -> None:
    switch = argparse.BooleanOptionalAction
    group.add_argument("--quantize", choices=METHODS, help="how weights are quantised")
    text = "sample text, or .jsonl with texts (default: a built-in one)"
    group.add_argument("--calibration", type=pathlib.Path, metavar="FILE", help=text)
    group.add_argument("--samples", type=int, default=128, metavar="N", help="of the calibration (default: 128)")
    group.add_argument("--sequence-length", type=int, default=512, metavar="N", help="of a sample (default: 512)")
    group.add_argument("--bits", type=int, metavar="N", help="of int4, gptq and awq (default: 4)")
    group.add_argument("--group-size", type=int, metavar="N", help="inputs that share a scale, -1: all (default: 128)")
    group.add_argument("--symmetric", action=switch, help="no zero points (default: but awq)")
    group.add_argument("--activations", action="store_true", default=None, help="int8, fp8: round inputs, too")
    group.add_argument("--blocks", action="store_true", default=None, help="fp8: a scale for 128 by 128 weights")
    damp = "gptq: share of the mean diagonal that is added (default: 0.01)"
    group.add_argument("--damp", type=float, metavar="X", help=damp)
    group.add_argument("--act-order", action="store_true", default=None, help="gptq: the largest inputs first")
    group.add_argument("--static-groups", action="store_true", default=None, help="gptq: groups are of neighbours")
    alpha = "smoothquant: what weights take over (default: 0.5)"
    group.add_argument("--alpha", type=float, metavar="X", help=alpha)
    group.add_argument("--clip", action=switch, help="awq: limit weights (default: yes)")
    group.add_argument("--nested", action=switch, help="nf4, fp4: 8-bit scales (default: yes)")
    group.add_argument("--short-groups", action="store_true", default=None, help="the last group may be a shorter one")
    group.add_argument("--weight-format", metavar="FORMAT", help="compressed-tensors, gptq or awq")
