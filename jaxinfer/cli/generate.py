"""Flags of `jaxinfer generate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxinfer.cli import chat
from jaxinfer.cli.engine import add_engine, add_sampling, engine_settings, sampling_settings
from jaxinfer.cli.flags import all_flags
from jaxinfer.cli.parser import Parser
from jaxinfer.config.aliases import DEMO_ADAPTERS, demo_adapter

_COMMON = (
    "prompt",
    "prompt_file",
    "prompts",
    "image",
    "max_tokens",
    "temperature",
    "seed",
    "n",
    "lora",
    "json",
    "stats",
    "tensor_parallel_size",
)
_PROMPTS = ("prompt", "prompt_file", "prompts")
_EXAMPLES = (
    'jaxinfer generate demo --prompt "ROMEO:" --temperature 0.8',
    'jaxinfer generate demo --prompt "The sea" --temperature 0.8 --lora melville',
    "echo -n 'To be, or not to be' | jaxinfer generate demo --max-tokens 40",
    "jaxinfer generate path/to/folder --prompt-file letter.txt --json --logprobs 5",
    "jaxinfer generate path/to/folder --prompts questions.jsonl --json",
    'jaxinfer generate path/to/folder --image cat.jpg --prompt "What is this?"',
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags; ``settings`` and ``sampling`` are given fields of the engine config and the request, ``shown``
    are the images and videos."""
    parser = make_parser()
    args = parser.parse_args(argv)
    parser.take_model(args)
    args.shown = [*args.image, *args.video]
    for name in ("json", "image", "video", *_PROMPTS):
        if args.chat and getattr(args, name):
            parser.error(f"--chat and --{name.replace('_', '-')} exclude each other: a conversation is typed and read")
    given = [f"--{name.replace('_', '-')}" for name in _PROMPTS if getattr(args, name)]
    if len(given) > 1:
        parser.error(f"{' and '.join(given)} exclude each other")
    if args.system is not None and not args.chat:
        parser.error("--system is the first message of a conversation: it needs --chat")
    if args.chat_template is not None and given and not args.shown:
        parser.error("--chat-template renders conversations: it needs --chat, --image or --video")
    args.lora = [(name, path or _folder(parser, args.model, name)) for name, path in args.lora]
    args.settings, args.sampling = engine_settings(parser, args), sampling_settings(args)
    if args.lora:
        args.settings = {"enable_lora": True, "max_loras": len(set(args.lora)), **args.settings}
    return args


def make_parser() -> Parser:
    """Return the parser."""
    parser = Parser("jaxinfer generate", "Generate text offline, in this process.", _EXAMPLES, _COMMON)
    what = parser.add_argument_group("prompt (default: piped standard input; in a terminal, a chat)")
    text = "text to continue; may be repeated"
    what.add_argument(*all_flags("prompt"), dest="prompt", action="append", metavar="TEXT", help=text)
    whole = "file with one prompt, its whole text (-: stdin)"
    what.add_argument(*all_flags("prompt_file"), dest="prompt_file", metavar="FILE", help=whole)
    each = 'file with one prompt per line; in a .jsonl file each line is a JSON string or {"prompt": TEXT}'
    what.add_argument("--prompts", metavar="FILE", help=each)
    image = "image that the prompts are about, before their text in a chat message; may be repeated"
    what.add_argument("--image", action="append", default=[], metavar="FILE", help=image)
    video = "frames of a video, in the same place; may be repeated"
    what.add_argument("--video", action="append", nargs="+", default=[], metavar="FRAME", help=video)
    what.add_argument("--fps", type=float, metavar="RATE", help="frames of a video in a second (default: 2)")
    what.add_argument("--chat", action="store_true", help="chat in the terminal, like jaxinfer chat")
    chat.add_system(what)
    shipped = ", ".join(f"{name} ({what})" for name, what in DEMO_ADAPTERS.items())
    adapter = f"LoRA adapter and its folder; adapters shipped with demo need no PATH: {shipped}. "
    adapter += "Give one for all prompts, or one per prompt, in order"
    what.add_argument("--lora", action="append", type=_adapter, default=[], metavar="NAME[=PATH]", help=adapter)
    out = parser.add_argument_group("output")
    streaming = "print text while it is generated (default: on for a single output)"
    out.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True, help=streaming)
    out.add_argument("--json", action="store_true", help="print one JSON object per prompt, one per line")
    chat.add_stats(out)
    add_sampling(parser)
    add_engine(parser, "the number of sequences requested, at most 32")
    return parser


def _adapter(text: str) -> tuple[str, str]:
    """Split an adapter argument into name and path; the path may be empty."""
    name, equals, path = text.partition("=")
    if not name or (equals and not path):
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=PATH, or the name of an adapter of demo")
    return name, path


def _folder(parser: Parser, model: str, name: str) -> str:
    folder = demo_adapter(model, name)
    if folder is None:
        known = f"{', '.join(DEMO_ADAPTERS)} are adapters of demo"
        parser.error(f"--lora {name} is no adapter that ships for {model}: {known}, others are NAME=PATH")
    return str(folder)
