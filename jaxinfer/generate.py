"""`python -m jaxinfer.generate`: text from a model, at the terminal."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.flags import add_flags, given_settings
from jaxinfer.llm import LLM, CompletionOutput, Delta, LogprobsDict, RequestOutput
from jaxinfer.loading import DTYPES, LOADING_ERRORS
from jaxinfer.stats import Clock, measured_bandwidth, report
from jaxinfer.types import RequestError, SamplingParams

ERRORS = (*LOADING_ERRORS, EngineConfigError, RequestError)

# Here --seed is the request's own (the engine's is where unset seeds of requests come from).
_NO_FLAGS = ("seed",)

_DEFAULT_PROMPT = "Once upon a time"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one sentence on stderr for what cannot be done as asked."""
    args = _parser().parse_args(argv)
    try:
        return _chat(args) if args.chat else _complete(args)
    except ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jaxinfer.generate", description="Generate text from a model.")
    parser.add_argument("--model", default="demo", help='"demo", a Hugging Face folder, or a hub id')
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", action="append", help="text to continue; may be given several times")
    what.add_argument("--prompt-file", help="a file whose whole text is the prompt (- is stdin)")
    what.add_argument("--chat", action="store_true", help="an interactive conversation with the model's template")
    out = parser.add_argument_group("output")
    out.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True, help="print as it generates")
    out.add_argument("--json", action="store_true", help="one JSON object a prompt, one a line")
    out.add_argument("--stats", action="store_true", help="TTFT, TPOT, tokens/s and share of the bandwidth limit")
    engine = parser.add_argument_group("engine (--max-num-seqs: by default as many as asked for)")
    engine.add_argument("--dtype", choices=DTYPES, default="auto")
    engine.add_argument("--check-finite", action="store_true", help="refuse weights with NaN or infinity")
    engine.add_argument("--compilation-cache-dir", help='where compiled programs are kept ("" keeps none)')
    add_flags(engine, EngineConfig, skip=_NO_FLAGS)
    _add_sampling(parser.add_argument_group("sampling (defaults: what the checkpoint recommends)"))
    return parser


# Options that go into SamplingParams under the same name; None keeps the checkpoint's or the field's default.
_SAMPLING: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "seed": int,
    "n": int,
    "min_tokens": int,
    "logprobs": int,
    "prompt_logprobs": int,
}


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-tokens", type=int, default=128)
    for name, kind in _SAMPLING.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind)
    group.add_argument("--stop", action="append", help="a text that ends the output; may be given several times")
    group.add_argument("--stop-token-ids", type=int, nargs="+")
    group.add_argument("--bad-words", nargs="+")
    group.add_argument("--ignore-eos", action="store_true")
    group.add_argument("--include-stop-str-in-output", action="store_true")
    group.add_argument("--skip-special-tokens", action=argparse.BooleanOptionalAction, default=True)


def _sampling(args: argparse.Namespace, llm: LLM) -> SamplingParams:
    names = (*_SAMPLING, "stop", "stop_token_ids", "bad_words")
    values = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return llm.default_sampling_params(
        **values,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
        include_stop_str_in_output=args.include_stop_str_in_output,
        skip_special_tokens=args.skip_special_tokens,
    )


def _make_llm(args: argparse.Namespace, sequences: int) -> LLM:
    return LLM(
        args.model,
        args.dtype,
        config=EngineConfig(**{"max_num_seqs": sequences, **given_settings(args, EngineConfig, skip=_NO_FLAGS)}),
        check_finite=args.check_finite,
        compilation_cache_dir=args.compilation_cache_dir,
    )


def _complete(args: argparse.Namespace) -> int:
    prompts = _prompts(args)
    llm = _make_llm(args, min(len(prompts) * (args.n or 1), 32))
    params = _sampling(args, llm)
    streaming = args.stream and not args.json and len(prompts) == 1 and params.n == 1
    if streaming:
        print(prompts[0], end="", flush=True)
    clock = Clock()
    outputs = llm.generate(prompts, params, on_delta=_printer(clock, streaming))
    clock.stop()
    if streaming:
        print()
    else:
        _print_all(outputs, args.json)
    if streaming and params.logprobs is not None:
        _print_logprobs(outputs[0].outputs[0])
    if args.stats:
        _print_stats(llm, clock, outputs)
    return 0


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt_file is None:
        return args.prompt or [_DEFAULT_PROMPT]
    try:
        if args.prompt_file == "-":
            return [sys.stdin.read()]
        return [pathlib.Path(args.prompt_file).read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(None, f"--prompt-file {args.prompt_file} cannot be read: {error}") from error


def _printer(clock: Clock, streaming: bool) -> Callable[[Delta], None]:
    def on_delta(delta: Delta) -> None:
        clock.tick(delta)
        if streaming:
            print(delta.text, end="", flush=True)

    return on_delta


def _print_all(outputs: list[RequestOutput], as_json: bool) -> None:
    for output in outputs:
        if as_json:
            print(json.dumps(_as_json(output), ensure_ascii=False))
            continue
        for completion in output.outputs:
            print(f"{output.prompt}{completion.text}")


def _as_json(output: RequestOutput) -> dict[str, Any]:
    fields = dataclasses.asdict(output)
    for completion in fields["outputs"]:
        completion["logprobs"] = _logprobs_json(completion["logprobs"])
    fields["prompt_logprobs"] = _logprobs_json(fields["prompt_logprobs"])
    return fields


def _logprobs_json(positions: list[LogprobsDict | None] | None) -> list[list[dict[str, Any]] | None] | None:
    if positions is None:
        return None
    return [
        None if position is None else [{"token_id": token, **c._asdict()} for token, c in position.items()]
        for position in positions
    ]


def _print_logprobs(output: CompletionOutput) -> None:
    for token, candidates in zip(output.token_ids, output.logprobs or [], strict=True):
        texts = ", ".join(f"{c.decoded_token!r} {c.logprob:.3f}" for c in candidates.values())
        print(f"{token:7d} {candidates[token].logprob:8.3f}   {texts}")


def _print_stats(llm: LLM, clock: Clock, outputs: list[RequestOutput]) -> None:
    model = llm.model.with_cache(llm.engine.config.kv_cache_dtype)
    print(report(model, clock, outputs, measured_bandwidth(), llm.engine.stats()), file=sys.stderr)


def _chat(args: argparse.Namespace) -> int:
    llm = _make_llm(args, 1)
    params = _sampling(args, llm)
    if llm.model.chat_template is None:
        raise RequestError(None, f"--chat: the model {args.model!r} has no chat template")
    messages: list[dict[str, str]] = []
    print("Type a message; an empty line or Ctrl-D ends the conversation.", file=sys.stderr)
    while text := _read_line():
        messages.append({"role": "user", "content": text})
        started = time.perf_counter()
        reply = llm.chat(messages, params, on_delta=lambda delta: print(delta.text, end="", flush=True))[0].outputs[0]
        print()
        messages.append({"role": "assistant", "content": reply.text})
        if args.stats:
            seconds = time.perf_counter() - started
            print(f"{len(reply.token_ids)} tokens, {len(reply.token_ids) / seconds:.1f} tokens/s", file=sys.stderr)
    return 0


def _read_line() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
