"""Host time of a step's launch and read: the runner's own work, with programs that return at once."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from benchmarks.traces.cost import MAX_LEN, Load, Requests, Steady, spread
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.execution.executor import LocalExecutor, StageRuntime
from jaxinfer.engine.execution.prepare import prepare
from jaxinfer.engine.execution.runner import Launched, Runner
from jaxinfer.engine.scheduling.plan import StepPlan, StepResult
from jaxinfer.engine.scheduling.scheduler import Scheduler
from jaxinfer.models.model import Model, abstract
from jaxinfer.types import Request, SequenceDelta
from jaxinfer.weights import init_params

_SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


class TimedRunner:
    """Runner with timed calls: wall-clock seconds, and seconds of this thread's processor time, step by step."""

    def __init__(self, runner: Runner, stage: StageRuntime) -> None:
        self._runner, self._stage = runner, stage
        self.sampled: Any = None
        self.launch_seconds: list[float] = []
        self.read_seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    def launch(self, plan: StepPlan) -> Launched | None:
        cpu, start = time.thread_time(), time.perf_counter()
        launched = self._runner.launch(plan)
        self.launch_seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.thread_time() - cpu)
        if launched is not None and launched.sampled is not None:
            self.sampled = launched.sampled
        return launched

    def read(self, launched: Launched | None) -> StepResult | None:
        cpu, start = time.thread_time(), time.perf_counter()
        result = self._runner.read(launched)
        self.read_seconds.append(time.perf_counter() - start)
        self.cpu_seconds[-1] += time.thread_time() - cpu
        return result

    def without_device(self) -> None:
        """Replace programs by no-ops: rows get the tokens that the last real step sampled."""
        run, sampled = self._stage.run, jax.block_until_ready(self.sampled)

        def leave(*arguments: Any) -> Any:
            return self._stage.pools

        self._stage.run = dataclasses.replace(
            run,
            decode=dict.fromkeys(run.decode, lambda params, slots, state, *rest: (state, sampled)),
            prefill=dict.fromkeys(run.prefill, leave),
            copy=leave,
        )


class RunnerServer:
    """An engine of a tiny model; after it has served one request, it runs without a device."""

    def __init__(self, load: Load) -> None:
        config = dataclasses.replace(load.config, swap_space_gib=0.0)
        self._engine = Engine(prepare(_model(), config, jax.default_backend()))
        runner, executor = self._engine._runner, self._engine._executor
        assert isinstance(runner, Runner)
        assert isinstance(executor, LocalExecutor)
        self._engine._runner = self.runner = TimedRunner(runner, executor.runtimes[-1])
        self.add(next(Requests()))
        while self._engine.has_work:
            self._engine.step()
        self.runner.without_device()

    @property
    def scheduler(self) -> Scheduler:
        return self._engine._scheduler

    def add(self, request: Request) -> None:
        prompt = tuple(token % _SMALL["vocab_size"] for token in request.prompt_token_ids)
        self._engine.add(dataclasses.replace(request, request_id=f"r{request.request_id}", prompt_token_ids=prompt))

    def step(self) -> list[SequenceDelta]:
        return self._engine.step()


def _model() -> Model:
    model = abstract(_SMALL, "float32", "tiny")
    return model.replace(params=init_params(model.specs, 0))


def row(load: Load, steps: int) -> dict[str, Any]:
    """Return the figures of ``steps`` steps, in seconds."""
    server = RunnerServer(load)
    steady, runner = Steady(load, server), server.runner
    for seconds in (runner.launch_seconds, runner.read_seconds, runner.cpu_seconds):
        seconds.clear()
    for _ in range(steps):
        steady.step()
    launch, read = np.asarray(runner.launch_seconds), np.asarray(runner.read_seconds)
    figures = {"launch": launch, "read": read, "runner": launch + read, "cpu": np.asarray(runner.cpu_seconds)}
    return {"sequences": load.sequences} | {name: spread(seconds) for name, seconds in figures.items()}


def describe(item: dict[str, Any]) -> str:
    """Format one line, milliseconds."""
    parts = ", ".join(
        f"{name} {item[name]['median'] * 1e3:.3f} (p99 {item[name]['p99'] * 1e3:.3f})"
        for name in ("launch", "read", "runner", "cpu")
    )
    return f"runner with {item['sequences']} running, programs that do nothing, median ms: {parts}"
