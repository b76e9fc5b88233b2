"""A server with times that can be computed by hand: a step takes a second and gives every running request a token."""

from __future__ import annotations

import dataclasses

from benchmarks.traces.replay import Counters, Occupancy
from jaxinfer.config import EngineConfig
from jaxinfer.config.defaults import CPU
from jaxinfer.types import FinishReason, Request, SequenceDelta


@dataclasses.dataclass
class ScriptedServer:
    """``settings`` configures the server; prompts take no time, and each adds ``hits`` prefix-cache hits."""

    settings: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    hits: int = 0
    step_seconds: float = 1.0

    def __post_init__(self) -> None:
        self.time = self.waited = 0.0
        self.entered: list[float] = []
        self.queue: list[Request] = []
        self.running: dict[str, list[int]] = {}  # tokens left and tokens given
        self._counters = Counters(0, 0, 0)

    @property
    def has_work(self) -> bool:
        return bool(self.queue or self.running)

    def add(self, request: Request) -> None:
        self.entered.append(self.time)
        self.queue.append(request)
        queries, hits, preemptions = self._counters
        self._counters = Counters(queries + len(request.prompt_token_ids), hits + self.hits, preemptions)

    def step(self) -> list[SequenceDelta]:
        if not self.running or self.settings.batching == "continuous":
            while self.queue and len(self.running) < (self.settings.max_num_seqs or CPU.max_num_seqs):
                request = self.queue.pop(0)
                self.running[request.request_id] = [request.params.max_tokens or 0, 0]
        self.time += self.step_seconds
        return [self._token(name) for name in list(self.running)]

    def _token(self, name: str) -> SequenceDelta:
        left = self.running[name]
        left[0], left[1] = left[0] - 1, left[1] + 1
        ended = left[0] == 0
        if ended:
            del self.running[name]
        return SequenceDelta(name, 0, [5], [], FinishReason.LENGTH if ended else None)

    def now(self) -> float:
        return self.time

    def wait(self, seconds: float) -> None:
        self.waited += seconds
        self.time += seconds

    def counters(self) -> Counters:
        return self._counters

    def occupancy(self) -> Occupancy:
        return Occupancy(sum(tokens for _, tokens in self.running.values()), 4 * len(self.running))
