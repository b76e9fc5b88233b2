"""An engine with a model, as a `replay.Server`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax

from benchmarks.traces.probe import counters, occupancy
from benchmarks.traces.replay import Counters, Occupancy
from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.execution.prepare import prepare
from jaxinfer.models.model import Model
from jaxinfer.types import Request, SequenceDelta


class RealServer:
    """Engine with a model. It is ready when constructed: all programs are compiled. Token ids in and out, no text."""

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self.engine = Engine(prepare(model, config, jax.default_backend()))

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def add(self, request: Request) -> None:
        self.engine.add(request)

    def step(self) -> Sequence[SequenceDelta]:
        return self.engine.step()

    def now(self) -> float:
        return time.perf_counter()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def counters(self) -> Counters:
        return counters(self.engine.stats())

    def occupancy(self) -> Occupancy:
        return occupancy(self.engine._scheduler)
