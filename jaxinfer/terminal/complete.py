"""`jaxinfer generate`: complete prompts given as flags, files or a pipe."""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxinfer.cli.interrupts import leaving_at_once
from jaxinfer.llm import LLM
from jaxinfer.lora.door import LoRARequest
from jaxinfer.opening import model_folder
from jaxinfer.outputs import CompletionOutput, Delta, LogprobsDict, RequestOutput
from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.arrays import arrays_json, expert_ids
from jaxinfer.terminal.chat import converse
from jaxinfer.terminal.start import in_one_sentence, start
from jaxinfer.terminal.stats import Clock, measured_bandwidth, report
from jaxinfer.text import load_template
from jaxinfer.types import experts_of

_NO_PROMPT = "give --prompt TEXT, --prompt-file FILE or --prompts FILE, or pipe a text in"
_MOST_TOGETHER = 32


@in_one_sentence
def run(args: argparse.Namespace) -> None:
    """Complete the prompts, or start a chat if there is no prompt and stdin is a terminal."""
    if args.chat or _is_talk(args):
        converse(args)
    else:
        complete(args, _prompts(args))


def complete(args: argparse.Namespace, prompts: list[str]) -> None:
    """Generate, and print the outputs as the flags request."""
    llm, params = start(args, min(len(prompts) * (args.n or 1), _MOST_TOGETHER))
    streaming = args.stream and not args.json and len(prompts) == 1 and params.n == 1
    clock, loras = Clock(), [LoRARequest(*each) for each in args.lora]
    on_delta = _printer(clock, ("" if args.shown else prompts[0]) if streaming else None)
    lora = loras[0] if len(loras) == 1 else loras or None
    with leaving_at_once():
        if args.shown:
            asked, options = (
                [question(args.shown, each) for each in prompts],
                {} if args.fps is None else {"fps": args.fps},
            )
            outputs = llm.chat(asked, params, lora=lora, mm_processor_kwargs=options, on_delta=on_delta)
        else:
            outputs = llm.generate(prompts, params, lora=lora, on_delta=on_delta)
    clock.stop()
    if streaming:
        print()
    else:
        _print_all(outputs, args.json)
    if streaming and params.logprobs is not None:
        _print_logprobs(outputs[0].outputs[0])
    if args.stats:
        _print_stats(llm, clock, outputs)


def question(shown: Sequence[str | list[str]], text: str) -> list[dict[str, Any]]:
    """Return a conversation that asks about images, and videos as lists of frames."""
    kinds = [("video" if isinstance(each, list) else "image", each) for each in shown]
    parts = [{"type": kind, kind: each} for kind, each in kinds]
    texts = [{"type": "text", "text": text}] if text else []
    return [{"role": "user", "content": [*parts, *texts]}]


def _is_talk(args: argparse.Namespace) -> bool:
    """Return whether to start a chat: no prompt is given, and stdin is a terminal.

    Raises:
        RequestError: so it is, but the model has no chat template.
    """
    if args.prompt or args.prompt_file or args.prompts or args.shown or args.json or not sys.stdin.isatty():
        return False
    if load_template(model_folder(args.model), args.chat_template) is None:
        raise RequestError(None, f"no prompt, and the model {args.model!r} has no chat template: {_NO_PROMPT}")
    return True


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt:
        return list(args.prompt)
    if args.prompts is not None:
        return _listed(args.prompts)
    if args.prompt_file is not None and args.prompt_file != "-":
        return [_read(args.prompt_file)]
    if args.prompt_file is None and sys.stdin.isatty():
        if args.shown:
            return [""]  # a model may have learnt to describe an image without being asked
        raise RequestError(None, f"no prompt: {_NO_PROMPT}")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # regardless of the locale
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(None, f"standard input is not UTF-8: {error}") from error
    if not text and not args.shown:
        raise RequestError(None, f"no prompt, and nothing on standard input: {_NO_PROMPT}")
    # echo appends a line end that is not meant; the text of a named file is used unchanged
    return [text if args.prompt_file == "-" else text.removesuffix("\n")]


def _read(path: str, flag: str = "--prompt-file") -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(None, f"{flag} {path} cannot be read: {error}") from error


def _listed(path: str) -> list[str]:
    """Return the prompts of a file, one per line; empty lines are skipped.

    Raises:
        RequestError: the file cannot be read or has no prompt, or a line of a .jsonl file is invalid.
    """
    lines = [(n, line) for n, line in enumerate(_read(path, "--prompts").split("\n"), 1) if line.strip()]
    if not lines:
        raise RequestError(None, f"--prompts {path}: there is no prompt in it")
    if not path.endswith(".jsonl"):
        return [line.removesuffix("\r") for _, line in lines]
    return [_json_prompt(line, f"--prompts {path}, line {n}") for n, line in lines]


def _json_prompt(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise RequestError(None, f"{where}: no JSON: {error}") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str) or not prompt:
        raise RequestError(None, f'{where}: must be a JSON string or {{"prompt": TEXT}}')
    return prompt


def _printer(clock: Clock, prompt: str | None) -> Callable[[Delta], None]:
    """Return a callback that ticks the clock and, given a prompt, prints it (with the first delta) and the output."""
    texts = itertools.chain([prompt], itertools.repeat(""))

    def on_delta(delta: Delta) -> None:
        clock.tick(delta)
        if prompt is not None:
            print(next(texts), delta.text, sep="", end="", flush=True)

    return on_delta


def _print_all(outputs: list[RequestOutput], as_json: bool) -> None:
    for output in outputs:
        if as_json:
            print(json.dumps(_as_json(output), ensure_ascii=False))
            continue
        for completion in output.outputs:
            if len(output.outputs) > 1:
                print(f"[{completion.index + 1}/{len(output.outputs)}]")
            print(f"{output.prompt or ''}{completion.text}")


def _as_json(output: RequestOutput) -> dict[str, Any]:
    fields = dataclasses.asdict(output)
    for completion, sample in zip(fields["outputs"], output.outputs, strict=True):
        del completion["positions"]
        if sample.positions and sample.positions[0].extras is not None:
            completion["arrays"] = arrays_json(sample.positions, -math.inf)
        completion["logprobs"] = _logprobs_json(completion["logprobs"])
    fields["prompt_logprobs"] = _logprobs_json(fields["prompt_logprobs"])
    if experts := experts_of(fields.pop("prompt_positions")):
        fields["prompt_routed_experts"] = list(map(expert_ids, experts))
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
