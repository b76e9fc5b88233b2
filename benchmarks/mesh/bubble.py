"""Pipeline bubble: the share of time in which the stages are idle."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax

from benchmarks.mesh.models import model
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.execution.commands import DecodeBatch
from jaxinfer.engine.execution.executor import LocalExecutor
from jaxinfer.engine.execution.runner import Runner
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request

_ROWS = 32
_SETTINGS: dict[str, Any] = {"max_num_seqs": _ROWS, "max_model_len": 768, "page_size": 64, "prefill_sizes": (64,)}
_PROMPT, _WARM = 16, 40
_AT_ONCE = 8  # rounds in flight


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure decoding with all slots in use: with steps in flight in every stage, and with one step at a time.

    ``idle``: 1 - ``free_ms`` / ``turn_ms``. A turn is a step of one microbatch; ``free_ms`` is its time when the same
    programs run on all stages at once and no stage waits for another stage or for the host. (Stages that
    share a processor slow each other down: the times of single stages would count that as waiting.)
    """
    count, found = options.stages, []
    for name, ahead in (("in flight", True), ("one at a time", False)):
        llm = LLM(model(), pipeline_parallel_size=count, async_scheduling=ahead, compilation_cache_dir="", **_SETTINGS)
        engine = llm.engine
        assert isinstance(engine, Engine)
        assert isinstance(engine._executor, LocalExecutor)
        microbatch, batches = _decode(engine, options)
        free = statistics.median(_free(engine._executor, batches, options.seconds) for _ in range(options.rounds))
        times = {
            "turn_ms": round(1e3 * microbatch, 2),
            "free_ms": round(1e3 * free, 2),
            "idle": round(1 - free / microbatch, 3),
        }
        found.append({"stages": count, "steps": name, **times})
        print(f"{count} stages, steps {name}: {times}")
    return found


def _decode(engine: Engine, options: argparse.Namespace) -> tuple[float, list[tuple[int, DecodeBatch]]]:
    """Return the seconds of a microbatch, and the decode batch of each."""
    params = SamplingParams(temperature=0.0, max_tokens=700, seed=0)
    for index in range(_ROWS):
        engine.add(Request(str(index), tuple(range(index, index + _PROMPT)), params))
    for _ in range(_WARM):
        engine.step()
    seconds = []
    for _ in range(options.rounds):
        start, steps = time.perf_counter(), 0
        while time.perf_counter() < start + options.seconds:
            engine.step()
            steps += 1
        seconds.append((time.perf_counter() - start) / steps)
    batches, runner = [], engine._runner
    assert isinstance(runner, Runner)
    for _ in range(engine.config.microbatches):
        plan = engine._scheduler.plan()
        batches.append(
            (plan.microbatch, runner._decode_batch(plan.microbatch, plan.decodes, engine.config.decode_sizes[-1]))
        )
    engine._executor.wait()
    return statistics.median(seconds), batches


def _free(executor: LocalExecutor, batches: list[tuple[int, DecodeBatch]], limit: float) -> float:
    """Return the seconds of a microbatch when each stage replays recorded inputs."""
    arrived = [(microbatch, batch, _arrivals(executor, microbatch, batch)) for microbatch, batch in batches]
    start, rounds = time.perf_counter(), 0
    while time.perf_counter() < start + limit:
        for _ in range(_AT_ONCE):
            for microbatch, batch, arrivals in arrived:
                _all_stages(executor, microbatch, batch, arrivals)
        rounds += _AT_ONCE
        executor.wait()
    return (time.perf_counter() - start) / (rounds * len(batches))


def _arrivals(executor: LocalExecutor, microbatch: int, batch: DecodeBatch) -> list[Any]:
    x: Any = executor.microbatches[microbatch].input_tokens
    found = []
    for part in executor.runtimes:
        found.append(jax.block_until_ready(part.arrive(x)))
        x = None if part.stage.last else part.pass_decode(batch, found[-1])
    return found


def _all_stages(executor: LocalExecutor, microbatch: int, batch: DecodeBatch, arrivals: list[Any]) -> None:
    for part, arriving in zip(executor.runtimes[:-1], arrivals, strict=False):
        part.pass_decode(batch, arriving)
    last, chosen = executor.runtimes[-1], executor.microbatches[microbatch]
    rows = batch.positions.shape[0]
    state, _ = last.run.decode[rows](
        last.params, chosen.slots, executor._state(chosen), batch, arrivals[-1], None, executor._open_masks.get(rows)
    )
    last.pools, chosen.last_tokens, chosen.sampler = state
