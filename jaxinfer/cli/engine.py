"""Flags of the commands with an in-process engine: the model, the engine, sampling."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

from jaxinfer.cli.flags import add_groups, all_flags, given_settings, whole_number
from jaxinfer.cli.parser import Parser
from jaxinfer.config import EngineConfig, EngineConfigError, check
from jaxinfer.config.aliases import DTYPES, known_dtype
from jaxinfer.sampling_params import SamplingParams

# On the command line --seed is that of the request; the engine's seed is the source of unset request seeds.
_NO_FLAGS = ("seed",)

MAX_TOKENS = 128

# Options passed to SamplingParams under the same name; the defaults are those of the checkpoint or the field.
SAMPLING: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "most tokens of an output"),
    "temperature": (float, "0: always the likeliest token; more: more variety"),
    "top_p": (float, "sample from the likeliest tokens whose probabilities come to this"),
    "top_k": (int, "sample from so many of the likeliest tokens; 0: from all"),
    "min_p": (float, "leave out tokens below this share of the likeliest one's probability"),
    "presence_penalty": (float, "lowers logits of tokens that the output has"),
    "frequency_penalty": (float, "the same, for each time that it has them"),
    "repetition_penalty": (float, "divides positive logits of tokens of prompt and output"),
    "seed": (int, "the same seed gives the same text (default: drawn; --stats and --json show it)"),
    "n": (int, "outputs for each prompt"),
    "min_tokens": (int, "tokens before which an output does not end"),
    "thinking_token_budget": (int, "tokens of a thought after which it is closed"),
    "logprobs": (int, "show the log probabilities of so many tokens at each position"),
    "prompt_logprobs": (int, "the same for the prompt; with --json"),
}
_LISTS = ("stop", "stop_token_ids", "bad_words")
_SWITCHES = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


def add_engine(parser: Parser, sequences: str) -> None:
    """Add the flags of model and engine; ``sequences``: the default of max_num_seqs, in words."""
    parser.add_model("demo")
    group = parser.add_argument_group("the model, and how it is loaded")
    add_model_flag(group)
    add_dtype(group)
    whose = "whose code computes the model: auto, jaxinfer, or a family of yours, which is imported (default: auto)"
    group.add_argument(*all_flags("family"), default="auto", metavar="MODULE:NAME", help=whose)
    group.add_argument("--check-finite", action="store_true", help="refuse weights with NaN or infinity")
    group.add_argument("--compilation-cache-dir", metavar="DIR", help='of compiled programs ("" keeps none)')
    add_groups(parser, EngineConfig, skip=_NO_FLAGS, defaults={"max_num_seqs": sequences})


def add_model_flag(group: argparse._ArgumentGroup) -> None:
    """Add ``--model`` and its aliases."""
    group.add_argument(*all_flags("model"), metavar="MODEL", help="the model, where it is not the first word")


def add_dtype(group: argparse._ArgumentGroup) -> None:
    """Add ``--dtype``."""
    shown = "{" + ",".join(DTYPES) + "}"
    group.add_argument("--dtype", type=_dtype, default="auto", metavar=shown, help="of the weights (default: auto)")


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
    group = parser.add_argument_group("sampling (what the checkpoint recommends goes before the defaults below)")
    own = {field.name: field.default for field in dataclasses.fields(SamplingParams)} | {"max_tokens": MAX_TOKENS}
    for name, (kind, text) in SAMPLING.items():
        shown = text if own[name] is None else f"{text} (default: {own[name]})"
        value = {int: "N", float: "X"}[kind]
        read = whole_number if kind is int else kind
        group.add_argument(*all_flags(name), dest=name, type=read, metavar=value, help=shown)
    _add_speculation(group)
    _add_structured(group)
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the output; may be given several times")
    group.add_argument("--stop-token-ids", type=int, nargs="+", metavar="N", help="tokens that end the output")
    group.add_argument("--bad-words", nargs="+", metavar="TEXT", help="texts that the output does not have")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end of text")
    group.add_argument("--include-stop-str-in-output", action="store_true", help="keep the text that ended it")
    whether = "leave special tokens out of the text (default: on)"
    group.add_argument("--skip-special-tokens", action=argparse.BooleanOptionalAction, default=True, help=whether)


def _add_speculation(group: argparse._ArgumentGroup) -> None:
    """Add the fields of `Speculation`."""
    whether = "draft, where there is --speculative (default: on)"
    group.add_argument("--speculation", action=argparse.BooleanOptionalAction, default=None, help=whether)
    group.add_argument("--speculation-max-tokens", type=int, metavar="N", help="most draft tokens of a step; 0: none")
    lossy = "typical: keep drafts that are likely enough, which changes tokens (default: exact)"
    group.add_argument("--speculation-acceptance", metavar="{exact,typical}", help=lossy)


def _add_structured(group: argparse._ArgumentGroup) -> None:
    """Add the fields of `StructuredOutputs`."""
    one = group.add_mutually_exclusive_group()
    one.add_argument("--json-schema", type=_text, metavar="SCHEMA", help="the output is JSON of it (@FILE: in a file)")
    one.add_argument("--json-object", action="store_true", help="the output is a JSON object")
    one.add_argument("--regex", metavar="REGEX", help="the output matches a regular expression")
    one.add_argument("--choice", action="append", metavar="TEXT", help="the output is one of these; give it repeatedly")
    one.add_argument("--grammar", type=_text, metavar="GRAMMAR", help="the output is of it: Lark, or GBNF (@FILE)")
    one.add_argument("--structural-tag", type=_text, metavar="TAG", help="texts, tags and free text, as JSON (@FILE)")


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
    given = {name: value for name in (*SAMPLING, *_LISTS) if (value := getattr(args, name)) is not None}
    about = {"enabled": args.speculation} | {n: getattr(args, f"speculation_{n}") for n in ("max_tokens", "acceptance")}
    if asked := {name: value for name, value in about.items() if value is not None}:
        given["speculation"] = asked
    if structured := _structured(args):
        given["structured_outputs"] = structured
    return {"max_tokens": MAX_TOKENS, **given, **{name: getattr(args, name) for name in _SWITCHES}}
