"""`python -m tests.parallel.process_engine WORK`: one process of a multi-process engine. WORK is JSON (`Work`).

Process 0 prints the result of `run` as one line of JSON.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import socket
import sys
import threading
import time
import traceback
from typing import Any
from unittest import mock

import numpy as np

from jaxinfer.compilations import count_compilations
from jaxinfer.config import EngineConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.distributed.leader import FollowerMemory, follow
from jaxinfer.group_weights import FollowingWeights, LeadingWeights
from jaxinfer.loading import open_weights, start_engine, start_follower
from jaxinfer.models.model import Model
from jaxinfer.models.vision.tower import Vision
from jaxinfer.parallel.group import Group, Membership, join, lead
from jaxinfer.parallel.processes import join_processes
from jaxinfer.sampling_params import RequestError
from jaxinfer.served import ServedModel, without_weights
from jaxinfer.types import PlacedImage, Request
from tests.fakes import mixed_params
from tests.lora.drawn import drawn

TIGHT: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 6,
    "page_size": 16,
    "num_pages": 24,
    "prefill_sizes": [32],
    "max_prefill_rows": 1,
    "max_logprobs": 3,
    "swap_space_gib": 0.01,
    "seed": 0,
}


_AMID = 6  # steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Work of a process. ``settings``: overrides of `TIGHT`; ``greedy``: greedy tokens only, without logprobs;
    ``loras``: names of adapters, the last of which is loaded while requests run; ``images``: most prompts have some;
    ``changes``: step, name and arguments of what `Changes` does; ``roots``: folder of weights of each process."""

    number: int
    processes: int
    port: int
    model: str
    requests: int
    greedy: bool
    settings: dict[str, Any]
    loras: list[str] = dataclasses.field(default_factory=list)
    images: bool = False
    changes: list[list[Any]] = dataclasses.field(default_factory=list)
    roots: list[str] = dataclasses.field(default_factory=list)


class Changes:
    """Changes of weights and memory of a running engine, and what became of them."""

    def __init__(self, engine: EngineCore, model: Model, work: Work, group: Group | None) -> None:
        self._engine, self._root, self._due = engine, work.roots[0], work.changes
        read = functools.partial(open_weights, served=without_weights(model), config=engine.config)
        self._read = read if group is None else lambda folder: (folder,)
        self._served = ServedModel(model, engine)
        if group is not None:
            self._served = LeadingWeights(model, engine, group, read, self._root)
        self._staging: concurrent.futures.Future[Any] | None = None
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self.refused, self.sums = list[str](), list[dict[str, str]]()

    def at(self, step: int) -> None:
        for due, name, *given in self._due:
            if due == step:
                getattr(self, f"_{name}")(*given)

    def _stage(self, folder: str) -> None:
        """Read weights while steps run, until `_commit`."""
        self._staging = self._pool.submit(lambda: self._served.stage(self._read(f"{self._root}/{folder}")))

    def _commit(self, version: int | None = None) -> None:
        assert self._staging is not None
        try:
            staged = self._staging.result()
            try:
                self._served.commit(staged, version)
            except RequestError:
                self._served.discard(staged)
                raise
        except RequestError as error:
            self.refused.append(str(error))

    def _sleep(self, *given: Any) -> None:
        self._served.sleep(*given)

    def _wake(self, *given: Any) -> None:
        self._served.wake_up(*given)

    def _checksums(self) -> None:
        self.sums.append(self._served.checksums())


def request(number: int, vocab: int, greedy: bool) -> Request:
    """Return a request: prompts of many lengths, some with a shared prefix; now and then several samples."""
    length = (3 + 11 * number) % 90 + 2
    prompt = [(5 * place if place < 20 else 7 * number * place + place) % vocab for place in range(length)]
    params = mixed_params(number, max_tokens=24, n=1 + (number % 5 == 3))
    params = dataclasses.replace(params, min_tokens=0, stop_token_ids=())
    if greedy:
        params = dataclasses.replace(params, temperature=0.0, logprobs=None, prompt_logprobs=None, n=1)
    return Request(f"r{number}", tuple(prompt), params)


def with_images(request: Request, number: int, vision: Vision) -> Request:
    """Return the request with images within its prompt, some of which other requests have, too."""
    text = [min(token, min(vision.placeholders) - 1) for token in request.prompt_token_ids[:40]]
    prompt, placed = text[: 1 + number % 7], list[PlacedImage]()
    for seed in (number % 5, 5 + number)[: number % 3]:
        image = vision.processor.prepare(np.random.default_rng(seed).integers(0, 256, (90, 70 + 9 * seed, 3), np.uint8))
        start = len(prompt)
        prompt += vision.processor.expand(image)[0]
        placed.append(PlacedImage(start, len(prompt), image))
    prompt = (*prompt, *text[1 + number % 7 :], 5)
    return dataclasses.replace(request, prompt_token_ids=prompt, images=tuple(placed))


def add(engine: EngineCore, model: Model, work: Work, numbers: range, loras: list[str]) -> None:
    """Add requests that use no adapter and each of ``loras`` in turn."""
    refs = [None, *(engine.loras.load(name, name) for name in loras)] if engine.loras else [None]
    for number in numbers:
        asked = request(number, model.config.vocab_size, work.greedy)
        if work.images and model.vision is not None:
            asked = with_images(asked, number, model.vision)
        engine.add(dataclasses.replace(asked, lora=refs[number % len(refs)]))


def run(engine: EngineCore, model: Model, work: Work, group: Group | None) -> dict[str, Any]:
    """Return the tokens and logprobs of each sample, and the engine statistics that the tests check."""
    found: dict[str, list[Any]] = {}
    versions = set[int]()
    changes = Changes(engine, model, work, group) if work.changes else None
    half = work.requests // 2 if work.loras else work.requests
    add(engine, model, work, range(half), work.loras[:-1])
    for step in itertools.count():
        if changes is not None:
            changes.at(step)
        if not engine.has_work:
            break
        if step == _AMID and work.loras:
            add(engine, model, work, range(half, work.requests), work.loras)
        for delta in engine.step():
            logprobs = [repr(each) for each in (*delta.logprobs, *(delta.prompt_logprobs or ()))]
            found.setdefault(f"{delta.request_id}.{delta.index}", []).extend([*delta.token_ids, *logprobs])
            versions.update(version for version, _ in delta.weight_versions)
    engine.check()
    stats = engine.stats()
    return {
        "found": found,
        "preempted": sum(stats.preemptions.values()),
        "hits": stats.prefix_hits,
        "encoded": [stats.encoder_queries, stats.encoder_hits],
        "compiled": stats.compilations,
        "versions": sorted(versions),
        "refused": [] if changes is None else changes.refused,
        "sums": [] if changes is None else changes.sums,
    }


def ended(reason: str, hangs: bool) -> None:
    print(reason, hangs, file=sys.stderr, flush=True)
    print(sum(compiled.count for compiled in _compiled), flush=True)
    os._exit(0 if "is gone" in reason else 4)


def dismiss(group: Group) -> None:
    """Let the other processes end, and wait for them: JAX would end them at once when this one has."""
    group._ended.acquire(blocking=False)
    for peer in group._peers:
        peer.channel._socket.shutdown(socket.SHUT_WR)
    while not all(peer.lost for peer in group._peers):
        time.sleep(0.05)


_compiled = list[Any]()  # programs that this process has compiled since it follows


def follow_with_weights(work: Work, config: EngineConfig, group: Group) -> None:
    model, resolved, executors = start_follower(work.model, config, group, compilation_cache_dir="")
    served = ServedModel(model, FollowerMemory(executors, resolved))
    read = functools.partial(open_weights, served=without_weights(model), config=resolved)
    root = work.roots[work.number] if work.roots else None
    with count_compilations() as compiled:
        _compiled.append(compiled)
        weights = FollowingWeights(served, group, read, root)
        threading.Thread(target=weights.listen, daemon=True).start()
        follow(executors, group, weights.changes)


def main() -> None:
    work = Work(**json.loads(sys.argv[1]))
    mock.patch("jaxinfer.lora.open.read_adapter", lambda folder, specs, **_: drawn(specs, folder.name)).start()
    group: Group | None = None
    if work.processes > 1:
        meet = lead if work.number == 0 else join
        who = {"num_processes": work.processes, "process_id": work.number, "address": f"127.0.0.1:{work.port}"}
        membership = Membership(**who, key=b"sixteen bytes or more", timeout=60.0, settings={})
        group = meet(membership, ended, lambda: None)
        join_processes(group.coordinator, work.processes, work.number)
    config = EngineConfig(**{**TIGHT, **work.settings})
    if group is not None and work.number:
        follow_with_weights(work, config, group)
    model, engine = start_engine(work.model, config, compilation_cache_dir="", show_progress=False, group=group)
    result = run(engine, model, work, group)
    if group is not None:
        dismiss(group)
    print(json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    finally:
        traceback.print_exc()
        os._exit(1)  # at its normal end a process waits for minutes for the others
