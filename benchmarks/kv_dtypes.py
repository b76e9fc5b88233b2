"""Cost of a step with 8-bit KV caches on this machine, compared with caches of the model's dtype.

    python benchmarks/kv_dtypes.py                                  a random Llama of 125M parameters
    python benchmarks/kv_dtypes.py --model demo --text unseen.txt   also the log probability of a text

The engine's own programs run in turns; the median of the turns counts. See docs/kv_cache.md.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import numpy as np

from benchmarks.peers import machine
from benchmarks.peers.random_model import LLAMA_125M
from benchmarks.traces.record import Quiet
from jaxinfer.config import EngineConfig
from jaxinfer.engine.execution.commands import Decode, DecodeBatch, Prefill, PrefillBatch
from jaxinfer.engine.execution.executor import LocalExecutor
from jaxinfer.engine.execution.prepare import prepare
from jaxinfer.llm import LLM
from jaxinfer.loading import load_model
from jaxinfer.models.model import Model, abstract
from jaxinfer.parallel.mesh import mesh_for
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.weights import init_params

KINDS = ("auto", "int8", "fp8")
CHUNK, PAGE = 256, 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status."""
    options, quiet = parse(arguments), Quiet()
    model = random_llama(options.dtype) if options.model == "random-125m" else load_model(options.model, options.dtype)
    for rows in options.rows:
        for line in costs(model, rows, options.contexts, options.rounds):
            print(line, flush=True)
    if options.text is not None:
        for line in likelihoods(model, options.text.read_text(encoding="utf-8"), options.windows):
            print(line, flush=True)
    print(f"other programs used {quiet.others(len(machine.usable_cores())):.0%} of the machine")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="random-125m", help='"random-125m", "demo" or a folder')
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="the model's (default bfloat16)")
    add("--rows", type=int, nargs="*", default=[1, 8], help="sequences that decode together (default 1 8)")
    add("--contexts", type=int, nargs="+", default=[512, 2048], help="tokens of each, multiples of 256")
    add("--rounds", type=int, default=15, help="turns of each program (default 15)")
    add("--text", type=pathlib.Path, help="a text of which log probabilities are taken (default: none)")
    add("--windows", type=int, default=16, help="of 1000 tokens of it (default 16)")
    return parser.parse_args(arguments)


def random_llama(dtype: str) -> Model:
    model = abstract(LLAMA_125M, dtype, "random-125m")
    return model.replace(params=init_params(model.specs, 0, dtype))


# ---- steps


def costs(model: Model, rows: int, contexts: Sequence[int], rounds: int) -> list[str]:
    """Return a line for each context and program: milliseconds, and the difference to the model's dtype."""
    width = -(-max(contexts) // PAGE)
    executors = [executor(model, rows, width, kind) for kind in KINDS]
    tables = np.arange(rows * width, dtype=np.int32).reshape(1, rows, width)
    lines = []
    for context in contexts:
        for name, call in (("decode", decode(tables, context)), ("prefill 256", prefill(tables, context))):
            times = in_turns(executors, call, rounds)
            cells = "  ".join(
                f"{kind} {time * 1e3:.2f} ms ({time / times[0]:.2f})" for kind, time in zip(KINDS, times, strict=True)
            )
            lines.append(f"{name}, {rows} rows, {context} keys: {cells}")
    return lines


def executor(model: Model, rows: int, width: int, kind: str) -> LocalExecutor:
    config = EngineConfig(
        max_num_seqs=rows,
        max_model_len=width * PAGE,
        page_size=PAGE,
        num_pages=rows * width,
        prefill_sizes=(CHUNK,),
        max_prefill_rows=1,
        kv_cache_dtype=kind,
    )
    mesh = mesh_for(config)
    return LocalExecutor(prepare(model, config, jax.default_backend(), mesh), mesh)


def decode(tables: np.ndarray, context: int) -> Callable[[LocalExecutor], Any]:
    """Build a call that decodes one token of each row, at the last position of its context."""
    rows = tables.shape[1]

    def call(executor: LocalExecutor) -> None:
        few = executor.microbatches[0].last_tokens.shape[0]  # a CPU may pad the batch to more rows
        row_tables = np.resize(tables, (1, few, tables.shape[2]))
        positions = np.where(np.arange(few) < rows, context - 1, -1).astype(np.int32)
        executor.run(Decode(0, DecodeBatch(np.ones(few, np.int32), positions, np.zeros(few, np.int32), row_tables)))

    return call


def prefill(tables: np.ndarray, context: int) -> Callable[[LocalExecutor], Any]:
    """Build a call that prefills the last chunk of a prompt of ``context`` tokens."""
    start, length = np.array([context - CHUNK], np.int32), np.array([CHUNK], np.int32)
    batch = PrefillBatch(np.ones((1, CHUNK), np.int32), start, length, tables[:, :1].copy())
    return lambda executor: executor.run(Prefill(batch))


def in_turns(executors: Sequence[LocalExecutor], call: Callable[[LocalExecutor], Any], rounds: int) -> list[float]:
    """Return the median seconds of a call for each executor, measured in turns."""
    times: list[list[float]] = [[] for _ in executors]
    for round_number in range(rounds + 1):
        for seconds, executor in zip(times, executors, strict=True):
            begin = time.perf_counter()
            call(executor)
            executor.wait()
            seconds += [time.perf_counter() - begin] if round_number else []
    return [statistics.median(seconds) for seconds in times]


# ---- texts


def likelihoods(model: Model, text: str, windows: int) -> list[str]:
    """Return a line for each dtype: mean log probability of a text's tokens, and difference to the first dtype."""
    assert model.tokenizer is not None
    bos, *ids = model.tokenizer.encode(text)
    prompts = [[bos, *ids[start : start + 1000]] for start in range(0, 1000 * windows, 1000)]
    settings: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 1024, "prefill_sizes": (CHUNK,)}
    lines, exact = [], np.zeros(0)
    for kind in KINDS:
        llm = LLM(model, kv_cache_dtype=kind, show_progress=False, **settings)
        found = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
        pairs = [zip((output.prompt_logprobs or [])[1:], output.prompt_token_ids[1:], strict=True) for output in found]
        logprobs = np.array([where[token].logprob for each in pairs for where, token in each if where is not None])
        exact = exact if exact.size else logprobs
        off = logprobs - exact
        lines.append(
            f"{kind}: mean log probability of {off.size} tokens {logprobs.mean():.5f}, {off.mean():+.5f} "
            f"(standard error {off.std() / off.size**0.5:.5f}), one token {np.abs(off).mean():.4f} on average"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
