"""Session that starts engines in turn, each in a process of its own, and records their figures for every load."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.gpu_peers import device
from benchmarks.gpu_peers.loads import Load
from benchmarks.peers.worker import PeerDied, Worker

_START_SECONDS = 25.0  # seconds left that a start needs at least
_STEPPED = ("jaxinfer", "jaxinfer-relaxed", "vllm")  # engines that accept requests while running


@dataclasses.dataclass(frozen=True)
class Peer:
    """An engine: the command that runs it, and its settings in addition to the common ones."""

    name: str
    command: tuple[str, ...]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keeps_cache: bool = False


@dataclasses.dataclass(frozen=True)
class Task:
    """The task of every engine: the model, its settings, and the loads."""

    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    loads: Sequence[Load]
    folder: str
    work: pathlib.Path


class Session:
    """Rounds of starts. An engine's first start of a session is cold; later starts find its compilation cache.

    Args:
        deadline: time of `time.monotonic` by which work must end: nothing starts that would likely end later.
        keep: called with the record after each figure, so that an interrupted run loses nothing.
    """

    def __init__(self, task: Task, deadline: float, keep: Callable[[dict[str, Any]], None]) -> None:
        self._task, self._deadline, self._keep = task, deadline, keep
        self._rates: dict[str, float] = {}
        self.record: dict[str, Any] = {"starts": [], "absent": {}, "skipped": [], "versions": {}, "check": {}}

    def run(self, peers: Sequence[Peer], rounds: int) -> dict[str, Any]:
        """Run ``rounds`` rounds, every other round in reverse order; return the record."""
        for name in {peer.name for peer in peers}:
            shutil.rmtree(self._cache(name), ignore_errors=True)
        for number in range(rounds):
            for peer in peers if number % 2 == 0 else peers[::-1]:
                if peer.name in self.record["absent"]:
                    continue
                if self._left() < _START_SECONDS:
                    self.record["skipped"].append(f"round {number}: {peer.name}: no time was left")
                    continue
                try:
                    self._start(peer, number, last=number == rounds - 1)
                except PeerDied as cause:
                    self.record["absent"][peer.name] = str(cause)
                    print(f"{peer.name}: {cause}", file=sys.stderr)
                self._keep(self.record)
        return self.record

    def _cache(self, name: str) -> pathlib.Path:
        return self._task.work / f"cache-{name}"

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _start(self, peer: Peer, number: int, last: bool) -> None:
        begun = time.perf_counter()
        cache = self._cache(peer.name)
        cache.mkdir(parents=True, exist_ok=True)
        command = ("env", f"VLLM_CACHE_ROOT={cache}", *peer.command)
        worker = Worker(peer.name, command, self._task.work / f"{peer.name}.log", max(1.0, self._left()))
        try:
            self.record["versions"][peer.name] = worker.versions
            told: dict[str, Any] = {"cache": str(cache)} if peer.keeps_cache else {}
            settings = {**self._task.settings, **peer.settings}
            model: dict[str, Any] = {"config": dict(self._task.config), "folder": self._task.folder}
            found = worker.ask("load", **model, settings=settings, **told)
            ready = {"round": number, "engine": peer.name, "seconds_to_ready": round(time.perf_counter() - begun, 2)}
            start = ready | {"start": found, "loads": {}}
            self.record["starts"].append(start)
            if self._task.folder:
                self._check(worker, peer.name)
            for load in self._task.loads:
                self._run(worker, peer.name, load, start, last)
            start["device_mib"] = device.used_mib()
        finally:
            worker.close()

    def _check(self, worker: Worker, name: str) -> None:
        vocab = self._task.config["vocab_size"]
        prompt = Load(1, 24, 1).prompts("check", vocab)[0]
        self.record["check"][name] = worker.ask("generate", prompt=prompt, output=32)["tokens"]

    def _run(self, worker: Worker, name: str, load: Load, start: dict[str, Any], last: bool) -> None:
        """Run one load after a short warm-up. Loads with arrivals wait until every engine's saturated rate is known."""
        rate = None
        if load.share is not None:
            if name not in _STEPPED or (start["round"] == 0 and not last):
                return
            rate = load.share * min(self._rates.values())
        if self._left() < 5.0:
            self.record["skipped"].append(f"round {start['round']}: {name}: {load}: no time was left")
            return
        vocab = self._task.config["vocab_size"]
        warm = Load(min(load.requests, 4), min(load.prompt, 64), 4)
        worker.ask("run", load=dataclasses.asdict(warm), seed="warm", vocab=vocab, rate=None)
        seed = f"round {start['round']}"
        figures = worker.ask("run", load=dataclasses.asdict(load), seed=seed, vocab=vocab, rate=rate)
        start["loads"][str(load)] = figures | ({} if rate is None else {"rate": rate})
        if name in _STEPPED and load == self._saturating():
            self._rates[name] = figures["requests_per_second"]
        print(f"{name} {load}: {figures['output_tokens_per_second']:.0f} tokens/s", file=sys.stderr)
        self._keep(self.record)

    def _saturating(self) -> Load:
        return max((load for load in self._task.loads if load.share is None), key=lambda load: load.requests)
