"""Mixture of experts and a dense model with as many active parameters per layer, measured in turns."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.mesh.models import EXPERTS, model
from jaxinfer.config import EngineConfig, resolve
from jaxinfer.engine.execution.commands import Decode, DecodeBatch, Prefill, PrefillBatch
from jaxinfer.engine.execution.executor import LocalExecutor
from jaxinfer.engine.execution.prepare import Prepared
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.sampling import SamplingLimits

_ROWS, _CHUNK, _PAGES = (1, 8, 64), 256, 320
_HIDDEN = 1024  # intermediate size of an expert


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure seconds of decode steps and of a prompt chunk; a ratio above 1: the mixture takes longer.

    Few rows activate few experts, but read all weights of these: the mixture reads up to as many times the weights as
    it has experts, which is why its ratio grows with the rows until all experts are in use.
    """
    dense = model(intermediate_size=_HIDDEN * EXPERTS["num_experts_per_tok"], num_hidden_layers=4)
    sparse = model(**EXPERTS, intermediate_size=_HIDDEN, num_hidden_layers=4)
    found = []
    for rows in _ROWS:
        calls = {name: _decode(each, rows) for name, each in (("dense", dense), ("sparse", sparse))}
        found.append(_row(f"decode {rows}", calls, options))
    calls = {name: _prefill(each) for name, each in (("dense", dense), ("sparse", sparse))}
    return [*found, _row(f"prefill {_CHUNK}", calls, options)]


def _row(name: str, calls: dict[str, Callable[[], None]], options: argparse.Namespace) -> dict[str, Any]:
    turns: dict[str, list[float]] = {kind: [] for kind in calls}
    for _ in range(options.rounds):
        for kind, call in calls.items():
            turns[kind].append(_seconds(call, options.seconds / 2))
    ratio = statistics.median(b / a for a, b in zip(turns["dense"], turns["sparse"], strict=True))
    ms = {f"{kind}_ms": round(1e3 * statistics.median(times), 3) for kind, times in turns.items()}
    print(f"{name:12} {ms}, {ratio:.2f} times")
    return {"step": name, **ms, "ratio": round(ratio, 3)}


def _seconds(call: Callable[[], None], limit: float) -> float:
    call()
    start, count = time.perf_counter(), 0
    while time.perf_counter() < start + limit or not count:
        call()
        count += 1
    return (time.perf_counter() - start) / count


def _decode(model: Model, rows: int) -> Callable[[], None]:
    executor = _executor(model, rows)
    rng = np.random.default_rng(0)
    tables = np.arange(rows * 4, dtype=np.int32).reshape(1, rows, 4)
    tokens = rng.integers(model.config.vocab_size, size=rows, dtype=np.int32)
    batch = DecodeBatch(tokens, np.full(rows, 100, np.int32), np.zeros(rows, np.int32), tables)

    def call() -> None:
        executor.run(Decode(0, batch))
        executor.wait()

    return call


def _prefill(model: Model) -> Callable[[], None]:
    executor = _executor(model, 1)
    tokens = np.random.default_rng(0).integers(model.config.vocab_size, size=(1, _CHUNK), dtype=np.int32)
    tables = np.arange(4, dtype=np.int32).reshape(1, 1, 4)
    batch = PrefillBatch(tokens, np.zeros(1, np.int32), np.full(1, _CHUNK, np.int32), tables)

    def call() -> None:
        executor.run(Prefill(batch))
        executor.wait()

    return call


def _executor(model: Model, rows: int) -> LocalExecutor:
    config = EngineConfig(max_num_seqs=rows, max_model_len=256, num_pages=_PAGES, prefill_sizes=(_CHUNK,))
    engine = resolve(config, model.cache_spec, max_position=model.config.max_position, itemsize=model.dtype.itemsize)
    return LocalExecutor(Prepared(model, engine, SamplingLimits(max_logprobs=engine.max_logprobs)), make_mesh())
