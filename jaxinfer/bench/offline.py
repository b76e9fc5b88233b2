"""``jaxinfer bench latency`` and ``jaxinfer bench throughput``: the engine in this process, without a server."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import rich.progress
from rich.console import Console
from rich.markup import escape

from jaxinfer.bench import ratios, table
from jaxinfer.bench.about import date_line, requests_line, settings_of, versions
from jaxinfer.bench.datasets import DATASETS, Asked, DatasetError
from jaxinfer.bench.iterations import Ran, measure
from jaxinfer.bench.names import OptionsError
from jaxinfer.bench.offline_options import JAXINFER, TRANSFORMERS
from jaxinfer.bench.prompts import WORDS, Ids, Words
from jaxinfer.bench.speculation import Counters, between
from jaxinfer.bench.target import Item
from jaxinfer.bench.traces import TraceError
from jaxinfer.bench.transformers_backend import BackendError, TransformersBackend
from jaxinfer.cli.interrupts import leaving_at_once
from jaxinfer.config import EngineConfigError
from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.llm import LLM
from jaxinfer.opening import LOADING_ERRORS, model_folder
from jaxinfer.outputs import Delta
from jaxinfer.sampling_params import RequestError, SamplingParams

_PIPED_WIDTH = 200  # characters: output of unknown width is not cut
_ERRORS = (OptionsError, DatasetError, TraceError, BackendError, EngineConfigError, RequestError, *LOADING_ERRORS)
_OURS = ("named", "model_by_default", "work", "settings")  # what the parser adds to the options
_LATENCIES = {"iteration": "iteration", "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}


def run(options: argparse.Namespace) -> int:
    """Return exit code 0, or 2: it cannot be measured (one sentence on stderr)."""
    try:
        with leaving_at_once():
            _command(options, Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH))
    except _ERRORS as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return 2
    return 0


def _command(options: argparse.Namespace, report: Console) -> None:
    before = None if options.compare is None else ratios.read(options.compare, options.command)
    with _out(options) as write, _backends(options) as backends:
        llm = backends[JAXINFER].llm
        table.show_header(report, _header(options, llm, backends))
        number = {name: getattr(options, name) for name in ("requests", "warmup", "iterations")}
        with _progress(options.iterations) as on_iteration:
            found = measure(backends, _items(options, llm), **number, on_iteration=on_iteration)
        content = _content(options, llm, found)
        write(content)
    for name, figures in found.items():
        _show(report, name if len(found) > 1 else "", figures)
    if len(found) > 1:
        names = (TRANSFORMERS, JAXINFER)
        report.print(ratios.table("", found[names[0]], found[names[1]], names))
    if before is not None:
        _compare(report, before, content)


@contextlib.contextmanager
def _out(options: argparse.Namespace) -> Iterator[Callable[[Mapping[str, Any]], object]]:
    """Yield a function that writes the JSON file, which is opened before anything is measured."""
    if options.out is None:
        yield lambda content: None
        return
    try:
        file = options.out.open("w", encoding="utf-8")
    except OSError as cause:
        raise OptionsError(f"{options.out} cannot be written: {cause.strerror}") from cause
    with file:
        yield lambda content: file.write(json.dumps(content, indent=1) + "\n")


class JaxinferBackend:
    """The engine of this process, with continuous batching, as a `Backend`."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self.llm, self._params = llm, params
        self._before: EngineStats = llm.engine.stats()

    def run(self, items: Sequence[Item]) -> Ran:
        """See `Backend.run`."""
        params = [dataclasses.replace(self._params, max_tokens=item.output_len) for item in items]
        deliveries: list[list[tuple[float, int]]] = [[] for _ in items]
        clock, start = time.perf_counter, time.perf_counter()

        def note(delta: Delta) -> None:
            if delta.token_ids:
                deliveries[delta.request].append((clock() - start, len(delta.token_ids)))

        prompts = [item.prompt for item in items]
        outputs = self.llm.generate(prompts, params, on_delta=note, progress=False)
        seconds = clock() - start
        return Ran(seconds, deliveries, [output.outputs[0].finish_reason for output in outputs])

    def figures(self) -> Mapping[str, Any]:
        """Return drafts, prefix cache, memory and busy share. Warm-ups count, too."""
        stats, usage = self.llm.engine.stats(), self.llm.memory()
        return {
            "cached_tokens": stats.prefix_hits - self._before.prefix_hits,
            "speculation": between(_counters(self._before), _counters(stats)),
            "memory": dataclasses.asdict(usage),
        }

    def close(self) -> None:
        """Free the engine."""
        self.llm.close()


def _counters(stats: EngineStats) -> Counters:
    places = {place: float(count) for place, count in enumerate(stats.draft_accepted_at)}
    return Counters(stats.drafts, stats.draft_tokens, stats.draft_accepted, places)


@contextlib.contextmanager
def _backends(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start the engines; transformers first, which says at once if it is not installed."""
    exact = DATASETS[options.dataset].lengths_given if options.ignore_eos is None else options.ignore_eos
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        if TRANSFORMERS in options.backends:
            found[TRANSFORMERS] = _transformers(options, exact)
            stack.callback(found[TRANSFORMERS].close)
        llm = LLM(
            options.model,
            options.dtype,
            family=options.family,
            check_finite=options.check_finite,
            compilation_cache_dir=options.compilation_cache_dir,
            **options.settings,
        )
        if TRANSFORMERS in options.backends:
            found[TRANSFORMERS].load(str(model_folder(options.model)), str(llm.model.dtype))
        params = SamplingParams(temperature=options.temperature, ignore_eos=exact, seed=options.seed)
        found[JAXINFER] = JaxinferBackend(llm, params)
        stack.callback(found[JAXINFER].close)
        gc.collect()
        gc.freeze()  # the collector skips objects that outlive the run
        yield dict(sorted(found.items()))


def _transformers(options: argparse.Namespace, exact: bool) -> TransformersBackend:
    if not (folder := model_folder(options.model)).is_dir():
        raise BackendError(f"transformers reads folders, and {folder} is a file")
    return TransformersBackend(
        options.transformers_python,
        batch_size=options.transformers_batch_size,
        temperature=options.temperature,
        ignore_eos=exact,
        seed=options.seed,
    )


def _items(options: argparse.Namespace, llm: LLM) -> Iterator[Item]:
    """Yield the requests, with token ids as prompts.

    Raises:
        DatasetError: the data set has texts, and the model no tokenizer.
    """
    dataset, tokenizer = DATASETS[options.dataset], llm.tokenizer
    if dataset.text and tokenizer is None:
        raise DatasetError(f"the {options.dataset} data set has texts, and the model has no tokenizer")
    per_word = 1.0
    if dataset.text and tokenizer is not None:
        per_word = len(tokenizer.encode(" ".join(WORDS))) / len(WORDS)
    prompts = Words(per_word) if dataset.text else Ids(llm.model.config.vocab_size)
    asked = Asked.of(options, prompts, per_word, llm.engine.config.max_model_len)
    for item in dataset.make(asked, options.seed):
        if isinstance(item.prompt, str) and tokenizer is not None:
            ids = tokenizer.encode(item.prompt)
            yield item._replace(prompt=ids, prompt_len=len(ids))
        else:
            yield item


def _header(options: argparse.Namespace, llm: LLM, backends: Mapping[str, Any]) -> dict[str, str]:
    lines = {"engine": repr(llm).removeprefix("<LLM ").removesuffix(">")}
    if (other := backends.get(TRANSFORMERS)) is not None:
        made = ", ".join(f"{name} {version}" for name, version in other.about["versions"].items())
        rows = min(options.transformers_batch_size, options.requests)
        lines[TRANSFORMERS] = f"{made}, on {other.about['device']}, batches of {rows}"
    load = f"{options.iterations} iterations of {options.requests} requests at once, after {options.warmup} warm-ups"
    return lines | {"requests": requests_line(options), "load": load, "date": date_line()}


@contextlib.contextmanager
def _progress(iterations: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that draws a bar on a terminal, between iterations and never during one."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done: None
        return
    with rich.progress.Progress(console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("iterations", total=iterations)
        yield lambda done: bar.update(task, completed=done, refresh=True)


def _content(options: argparse.Namespace, llm: LLM, found: Mapping[str, Any]) -> dict[str, Any]:
    device = llm.memory().devices[0].kind
    about = versions(("jax", "jaxlib", "numpy"))
    head = {"format": ratios.FORMAT, "command": options.command, "device": device, **about}
    settings = {name: value for name, value in settings_of(options).items() if value is not None and name not in _OURS}
    return {**head, "settings": json.loads(json.dumps(settings)), "backends": found}


def _show(report: Console, title: str, figures: Mapping[str, Any]) -> None:
    if title:
        report.print(f"\n{title}", highlight=False)
    report.print(table.latency_table(figures["latency"], _LATENCIES))
    for line in table.request_lines({"speculation": None, **figures}):
        report.print(escape(line), highlight=False)


def _compare(report: Console, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Print the ratios to an earlier run, and what differs between the two."""
    for name, figures in now["backends"].items():
        if name in before["backends"]:
            title = f"{name}, compared with {before['date']}"
            report.print(ratios.table(title, before["backends"][name], figures, ("before", "now")))
    given = [{"device": each["device"], **each["versions"], **each["settings"]} for each in (before, now)]
    for line in ratios.differences(*given):
        report.print(f"differs       {line}", markup=False, highlight=False)
