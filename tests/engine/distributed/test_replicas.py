"""Routing of requests to replicas, and the state and calls that replicas share."""

import dataclasses
from typing import Any

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.distributed import make as making
from jaxinfer.engine.distributed.replicas import Replicas
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.execution.prepare import Prepared
from jaxinfer.engine.scheduling.queues import Queued
from jaxinfer.engine.scheduling.stats import StatsRecorder, merged
from jaxinfer.kv.manager import KVUsage
from jaxinfer.lora.usage import LoRAUsage
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.sampling_params import QueueFullError, RequestError, SamplingParams
from jaxinfer.types import FinishReason, Request, SequenceDelta
from tests.fakes import random_model
from tests.lora.fakes import Folders, make_store


class FakeEngine(Engine):
    """An engine that serves nothing: every request waits until `finish`."""

    def __init__(self, prepared: Prepared, mesh: Any, progress: Any, make: Any, found: Any, loras: Any) -> None:
        self.make, self.was_found, self.calibration = make, found, found or object()
        self.config, self.loras = prepared.config, loras
        self.requests: dict[str, Request] = {}
        self.known: tuple[int, ...] = ()
        self.ended: list[SequenceDelta] = []
        self.aborted: list[tuple[str, int | None]] = []
        if progress is not None:
            progress(3, 4)

    @property
    def alive(self) -> int:
        return sum(request.params.n for request in self.requests.values())

    @property
    def queued(self) -> Queued:
        tokens = sum(len(request.prompt_token_ids) for request in self.requests.values())
        return Queued(len(self.requests), self.alive, tokens)

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self.ended)

    def cached(self, request: Request) -> int:
        return len(self.known) if request.prompt_token_ids[: len(self.known)] == self.known else 0

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request

    def abort(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        self.aborted.append((request_id, index))

    def finish(self, request_id: str, index: int = 0) -> None:
        self.ended.append(SequenceDelta(request_id, index, [1], (), FinishReason.LENGTH))

    def launch(self) -> bool:
        return True

    def read(self, launched: bool) -> list[SequenceDelta]:
        deltas, self.ended = self.ended, []
        for delta in deltas:
            self.requests.pop(delta.request_id, None)
        return deltas


def make(
    monkeypatch: pytest.MonkeyPatch, count: int = 2, progress: Any = None, loras: Any = None, **settings: Any
) -> Replicas:
    monkeypatch.setattr(making, "Engine", FakeEngine)
    monkeypatch.setattr(making, "replicas", lambda mesh: [mesh] * count)
    config = EngineConfig(**{"max_num_seqs": 4, "max_model_len": 64, **settings})
    return making._make_replicas(random_model(), config, "cpu", progress, make_mesh(), None, loras)


def test_the_calibration_of_the_first_holds_for_one_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    here = iter([True, True, False] * 2)  # is each replica local: read once for progress, once for each replica
    monkeypatch.setattr(making, "own_devices", lambda mesh: [mesh] if next(here) else [])
    told: list[tuple[int, int]] = []
    first, second, third = make(monkeypatch, 3, lambda done, total: told.append((done, total)))._engines
    assert isinstance(first, FakeEngine)
    assert [each.was_found for each in (first, second)] == [None, None]
    assert third.was_found is first.calibration
    assert told[:2] == [(3, 8), (7, 8)], "two replicas compile here"


def test_replicas_share_what_was_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = fakes(make(monkeypatch, 3))
    assert first.config is second.config is third.config


def test_replicas_have_the_same_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = make_store(Folders(p=1))
    engines = make(monkeypatch, loras=store)
    assert [each.loras for each in (engines, *engines._engines)] == [store] * 3


def request(name: str, prompt: tuple[int, ...] = (1, 2, 3), **params: Any) -> Request:
    return Request(name, prompt, SamplingParams(**{"max_tokens": 4, "seed": 0, **params}))


def fakes(engines: Replicas) -> list[FakeEngine]:
    return [engine for engine in engines._engines if isinstance(engine, FakeEngine)]


def served(engines: Replicas) -> list[list[str]]:
    return [list(engine.requests) for engine in fakes(engines)]


def test_requests_are_dealt_out_evenly(monkeypatch):
    engines = make(monkeypatch, 3)
    for number in range(7):
        engines.add(request(str(number)))
    assert served(engines) == [["0", "3", "6"], ["1", "4"], ["2", "5"]]


def test_a_replica_that_knows_the_prompt_serves_it_unless_it_has_far_more_to_do(monkeypatch):
    engines = make(monkeypatch)
    fakes(engines)[1].known = (1, 2)
    for number in range(5):
        engines.add(request(str(number)))
    engines.add(request("other", (9, 9)))
    assert served(engines) == [["3", "other"], ["0", "1", "2", "4"]]


def test_an_id_is_free_again_when_all_its_samples_have_ended(monkeypatch):
    engines = make(monkeypatch)
    engines.add(request("a", n=2))
    with pytest.raises(RequestError, match="request_id='a' is in use"):
        engines.add(request("a"))
    engine = fakes(engines)[0]
    engine.finish("a", 1)
    engines.step()
    with pytest.raises(RequestError, match="in use"):
        engines.add(request("a"))
    engines.abort("a", 0)
    assert engine.aborted == [("a", 0)]
    engines.add(request("a"))
    engines.abort("nobody")


def test_limits_are_for_all_and_the_rest_for_each(monkeypatch):
    engines = make(monkeypatch, max_waiting_requests=3, max_waiting_tokens=20, swap_space_gib=8.0, num_pages=7)
    for given in (engine.config for engine in fakes(engines)):
        assert (given.swap_space_gib, given.num_pages, given.max_waiting_requests) == (4.0, 7, None)
    assert (engines.config.data_parallel_size, engines.config.max_waiting_requests) == (2, 3)
    for number in range(2):
        engines.add(request(str(number)))
    with pytest.raises(QueueFullError, match="21 tokens would wait, max_waiting_tokens = 20"):
        engines.check_capacity(request("long", (1,) * 15))
    engines.add(request("2"))
    with pytest.raises(QueueFullError, match="4 requests would wait, max_waiting_requests = 3"):
        engines.add(request("3"))


def test_seeds_do_not_depend_on_the_number_of_replicas(monkeypatch):
    def seeds(count: int) -> list[int | None]:
        engines = make(monkeypatch, count, seed=5)
        return [engines.add(request(str(number), seed=None)).params.seed for number in range(4)]

    assert seeds(2) == seeds(3)
    assert len(set(seeds(2))) == 4


def test_progress_is_that_of_all(monkeypatch):
    told: list[tuple[int, int]] = []
    make(monkeypatch, 2, progress=lambda done, total: told.append((done, total)))
    assert told == [(3, 8), (7, 8)]


def test_figures_are_sums():
    first, second = StatsRecorder(lambda: 0.0), StatsRecorder(lambda: 0.0)
    first.prefix(10, 4)
    second.prefix(5, 5)
    second.preempted("swap")
    first.step(0.01)
    second.step(3.0)
    loras = LoRAUsage(3, 2, 1, 5, 4, {"a": 1}, {})
    one = first.snapshot(running=2, waiting={"capacity": 1}, kv=KVUsage(10, 5, 2, 3, 8, 1), loras=loras, compilations=9)
    two = second.snapshot(
        running=1, waiting={"capacity": 4}, kv=KVUsage(10, 10, 0, 0, 8, 0), loras=loras, compilations=9
    )
    both = merged([one, two], 0)
    assert (both.running, both.waiting, both.compilations) == (3, {"capacity": 5}, 0)
    assert (both.prefix_queries, both.prefix_hits, both.preemptions["swap"], both.steps) == (15, 9, 1, 2)
    assert both.kv == KVUsage(20, 15, 2, 3, 16, 1)
    assert both.loras == LoRAUsage(3, 4, 2, 10, 8, {"a": 2}, {})
    assert both.step_time.count == 2
    assert both.step_time.sum == pytest.approx(3.01)
    assert dataclasses.replace(one, compilations=0) == merged([one], 0)
