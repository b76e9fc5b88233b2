"""Flags of `jaxinfer generate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxinfer.cli import chat
from jaxinfer.cli.engine import add_engine, add_sampling, engine_settings, sampling_settings
from jaxinfer.cli.parser import Parser

_COMMON = ("prompt", "prompt_file", "max_tokens", "temperature", "seed", "n", "json", "stats", "tensor_parallel_size")
_EXAMPLES = (
    'jaxinfer generate demo --prompt "ROMEO:" --temperature 0.8',
    "echo -n 'To be, or not to be' | jaxinfer generate demo --max-tokens 40",
    "jaxinfer generate path/to/folder --prompt-file letter.txt --json --logprobs 5",
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; ``settings`` and ``sampling`` are those of the engine and of the request that were given."""
    parser = make_parser()
    args = parser.parse_args(argv)
    parser.take_model(args)
    for name in ("json", "prompt", "prompt_file"):
        if args.chat and getattr(args, name):
            parser.error(f"--chat and --{name.replace('_', '-')} exclude each other: a conversation is typed and read")
    if args.prompt and args.prompt_file:
        parser.error("--prompt and --prompt-file exclude each other")
    if args.system is not None and not args.chat:
        parser.error("--system is the first message of a conversation: it needs --chat")
    args.settings, args.sampling = engine_settings(parser, args), sampling_settings(args)
    if args.lora:
        args.settings = {"enable_lora": True, "max_loras": len(set(args.lora)), **args.settings}
    return args


def make_parser() -> Parser:
    """The parser."""
    parser = Parser("jaxinfer generate", "Text from a model, in this process.", _EXAMPLES, _COMMON)
    what = parser.add_argument_group("the prompt (without one: what is piped in, or a chat at a terminal)")
    what.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; may be given several times")
    what.add_argument("--prompt-file", metavar="FILE", help="a file whose whole text is the prompt (- is stdin)")
    what.add_argument("--chat", action="store_true", help="a conversation, as jaxinfer chat")
    chat.add_system(what)
    adapter = "an adapter's folder, whose text it is; one for all prompts, or one for each in their order"
    what.add_argument("--lora", action="append", type=_adapter, default=[], metavar="NAME=PATH", help=adapter)
    out = parser.add_argument_group("output")
    streaming = "print as it generates (default: on, where there is one output)"
    out.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True, help=streaming)
    out.add_argument("--json", action="store_true", help="one JSON object a prompt, one a line")
    chat.add_stats(out)
    add_sampling(parser)
    add_engine(parser, "as many as asked for, at most 32")
    return parser


def _adapter(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=PATH")
    return name, path
