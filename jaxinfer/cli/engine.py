"""Flags of the commands with an in-process engine: the model, the engine, sampling."""

from __future__ import annotations

import argparse
import pathlib

from jaxinfer.cli.flags import add_groups, add_preset, all_flags, attribute_docs, given_settings, whole_number
from jaxinfer.cli.parser import Parser
from jaxinfer.config import EngineConfig, EngineConfigError, check
from jaxinfer.config.aliases import DTYPES, known_dtype
from jaxinfer.sampling_params import LOGPROBS_MODES, PARAMETERS, SamplingParams

# On the command line --seed is that of the request; the engine's seed is the source of unset request seeds.
_NO_FLAGS = ("seed",)

MAX_TOKENS = 128

# Options passed to SamplingParams under the same name; the defaults are those of the checkpoint or the field.
_NUMBERS = {row.name: row for row in PARAMETERS.values() if row.kind in ("int", "float")}
_LISTS = ("stop", "stop_token_ids", "bad_words", "forced_token_ids", "logprob_token_ids", "logprobs_mode")
_SWITCHES = (
    "return_entropy",
    "return_sampling_mask",
    "return_routed_experts",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


def add_engine(parser: Parser, sequences: str) -> None:
    """Add the flags of model and engine; ``sequences``: the default of max_num_seqs, in words."""
    parser.add_model("demo")
    group = parser.add_argument_group("model and weight loading")
    add_model_flag(group)
    add_dtype(group)
    whose = "model implementation: auto, jaxinfer, or your own family, which is imported (default: auto)"
    group.add_argument(*all_flags("family"), default="auto", metavar="MODULE:NAME", help=whose)
    group.add_argument("--check-finite", action="store_true", help="reject weights with NaN or infinity")
    group.add_argument("--compilation-cache-dir", metavar="DIR", help='folder of compiled programs; "" keeps none')
    add_preset(parser)
    add_groups(parser, EngineConfig, skip=_NO_FLAGS, defaults={"max_num_seqs": sequences})
    parser.accept_always()


def add_model_flag(group: argparse._ArgumentGroup) -> None:
    """Add ``--model`` and its aliases."""
    group.add_argument(*all_flags("model"), metavar="MODEL", help="model, instead of the positional argument")


def add_dtype(group: argparse._ArgumentGroup) -> None:
    """Add ``--dtype``."""
    shown = "{" + ",".join(DTYPES) + "}"
    group.add_argument(
        "--dtype", type=_dtype, default="auto", metavar=shown, help="dtype of the weights (default: auto)"
    )


def _dtype(text: str) -> str:
    found = known_dtype(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be one of {', '.join(DTYPES)}")
    return found


def engine_settings(parser: Parser, args: argparse.Namespace) -> dict[str, object]:
    """Return the given engine settings; an invalid setting ends the command."""
    settings = given_settings(args, EngineConfig, skip=_NO_FLAGS)
    try:
        check(EngineConfig(**settings))
    except EngineConfigError as error:
        parser.refuse(str(error))
    return settings


def add_sampling(parser: Parser) -> None:
    """Add the sampling flags."""
    group = parser.add_argument_group("sampling (values recommended by the checkpoint override the defaults below)")
    docs = attribute_docs(SamplingParams)
    for name, row in _NUMBERS.items():
        default = MAX_TOKENS if name == "max_tokens" else row.default
        shown = docs[name] if default is None else f"{docs[name]} (default: {default})"
        read, value = (whole_number, "N") if row.kind == "int" else (float, "X")
        group.add_argument(*all_flags(name), dest=name, type=read, metavar=value, help=shown)
    _add_speculation(group)
    _add_structured(group)
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop string of the output; may be repeated")
    group.add_argument("--stop-token-ids", type=int, nargs="+", metavar="N", help="token ids that end the output")
    forced = "the token ids of the output, to score them"
    group.add_argument("--forced-token-ids", type=int, nargs="+", metavar="N", help=forced)
    group.add_argument("--logprobs-mode", choices=LOGPROBS_MODES, help="what log probabilities are")
    values = "token ids whose log probabilities --json shows"
    group.add_argument("--logprob-token-ids", type=int, nargs="+", metavar="N", help=values)
    group.add_argument("--return-entropy", action="store_true", help="show entropies with --json")
    group.add_argument("--return-sampling-mask", action="store_true", help="show what could be drawn with --json")
    group.add_argument("--return-routed-experts", action="store_true", help="show experts with --json")
    group.add_argument("--bad-words", nargs="+", metavar="TEXT", help="texts that must not occur in the output")
    group.add_argument("--ignore-eos", action="store_true", help="continue after the EOS token")
    group.add_argument("--include-stop-str-in-output", action="store_true", help="keep the stop string in the output")
    whether = "omit special tokens from the text (default: on)"
    group.add_argument("--skip-special-tokens", action=argparse.BooleanOptionalAction, default=True, help=whether)


def _add_speculation(group: argparse._ArgumentGroup) -> None:
    """Add the fields of `Speculation`."""
    whether = "verify draft tokens, if --speculative is set (default: on)"
    group.add_argument("--speculation", action=argparse.BooleanOptionalAction, default=None, help=whether)
    group.add_argument("--speculation-max-tokens", type=int, metavar="N", help="maximum draft tokens per step; 0: none")
    lossy = "acceptance rule; typical: accept drafts that are likely enough, which changes outputs (default: exact)"
    group.add_argument("--speculation-acceptance", metavar="{exact,typical}", help=lossy)


def _add_structured(group: argparse._ArgumentGroup) -> None:
    """Add the fields of `StructuredOutputs`."""
    one = group.add_mutually_exclusive_group()
    one.add_argument("--json-schema", type=_text, metavar="SCHEMA", help="constrain output to this JSON Schema (@FILE)")
    one.add_argument("--json-object", action="store_true", help="constrain output to a JSON object")
    one.add_argument("--regex", metavar="REGEX", help="constrain output to this regular expression")
    one.add_argument(
        "--choice", action="append", metavar="TEXT", help="constrain output to one of these texts; may be repeated"
    )
    one.add_argument(
        "--grammar", type=_text, metavar="GRAMMAR", help="constrain output to this Lark or GBNF grammar (@FILE)"
    )
    one.add_argument(
        "--structural-tag", type=_text, metavar="TAG", help="constrain tagged parts of the output, as JSON (@FILE)"
    )


def _structured(args: argparse.Namespace) -> dict[str, object]:
    """Return the fields that were given."""
    asked = {
        "json": args.json_schema,
        "json_object": args.json_object or None,
        "regex": args.regex,
        "choice": args.choice,
        "grammar": args.grammar,
        "structural_tag": args.structural_tag,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _text(given: str) -> str:
    """Return the text, or the contents of the file given as @FILE."""
    if not given.startswith("@"):
        return given
    try:
        return pathlib.Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{given[1:]!r} cannot be read: {error}") from error


def sampling_settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the fields of SamplingParams that were given."""
    given = {name: value for name in (*_NUMBERS, *_LISTS) if (value := getattr(args, name)) is not None}
    about = {"enabled": args.speculation} | {n: getattr(args, f"speculation_{n}") for n in ("max_tokens", "acceptance")}
    if asked := {name: value for name, value in about.items() if value is not None}:
        given["speculation"] = asked
    if structured := _structured(args):
        given["structured_outputs"] = structured
    return {"max_tokens": MAX_TOKENS, **given, **{name: getattr(args, name) for name in _SWITCHES}}
