"""A fake engine with known tokens; the test releases its steps one by one."""

import dataclasses
import threading

from jaxinfer.engine.core import Pace
from jaxinfer.kv.journal import Journal
from jaxinfer.sampling_params import QueueFullError, RequestError, SamplingParams
from jaxinfer.types import FinishReason, Request, SequenceDelta

SLOTS, CHUNK, QUEUE = 8, 4, 2000


@dataclasses.dataclass
class Sample:
    """A sample in progress: ``left`` prompt tokens to prefill, ``made`` tokens emitted."""

    request: Request
    index: int
    left: int
    made: int = 0


class FakeEngine:
    """An FCFS engine with eight slots and four prompt tokens a step; each sample with a slot has one page.

    ``gated``: a step waits until the test allows it.
    """

    pace, weight_version = Pace.RUNNING, 0

    def __init__(self, *, gated: bool = False) -> None:
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        self.steps = 0
        self.fault: BaseException | None = None
        self._gate = threading.Semaphore(0) if gated else None

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def pages(self) -> int:
        return len(self.running)

    def allow(self, steps: int) -> None:
        assert self._gate is not None
        for _ in range(steps):
            self._gate.release()

    def open_gate(self) -> None:
        self.allow(10**4)

    def add(self, request: Request) -> Request:
        if request.request_id in {s.request.request_id for s in (*self.waiting, *self.running)}:
            raise RequestError("request_id", f"={request.request_id!r} is in use")
        self.check_capacity(request)
        request = dataclasses.replace(request, params=dataclasses.replace(request.params, seed=7))
        self.waiting += [Sample(request, i, len(request.prompt_token_ids) - 1) for i in range(request.params.n)]
        return request

    def check_capacity(self, request: Request, ahead: int = 0) -> None:
        if len(self.waiting) + ahead >= QUEUE:
            raise QueueFullError("too many wait")

    def abort(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        def stays(sample: Sample) -> bool:
            return sample.request.request_id != request_id or index not in (None, sample.index)

        self.waiting, self.running = [list(filter(stays, samples)) for samples in (self.waiting, self.running)]

    def step(self) -> list[SequenceDelta]:
        if self._gate is not None and not self._gate.acquire(timeout=5):
            raise AssertionError("the test let no step through")
        if self.fault is not None:
            raise self.fault
        self.steps += 1
        deltas = [delta for sample in self.running if (delta := self._advance(sample)) is not None]
        ended = {(delta.request_id, delta.index) for delta in deltas if delta.finish_reason is not None}
        self.running = [s for s in self.running if (s.request.request_id, s.index) not in ended]
        room = SLOTS - len(self.running)
        self.running, self.waiting = self.running + self.waiting[:room], self.waiting[room:]
        return deltas

    def _advance(self, sample: Sample) -> SequenceDelta | None:
        if sample.left > 0:
            sample.left -= CHUNK
            return None
        token = expected(sample.request, sample.index)[sample.made]
        sample.made += 1
        reason = FinishReason.LENGTH if sample.made == sample.request.params.max_tokens else None
        return SequenceDelta(sample.request.request_id, sample.index, [token], [], reason)

    config = limits = loras = None
    pace = Pace.RUNNING

    def stats(self):
        raise NotImplementedError

    def temporaries(self) -> int:
        return 0

    def reset_prefix_cache(self) -> int:
        return 3

    def journals(self) -> list[Journal]:
        return []

    def check(self) -> None:
        if len(self.running) > SLOTS:
            raise AssertionError("more run than there are slots")


def make_request(name: str, prompt: int = 3, tokens: int = 5, n: int = 1) -> Request:
    ids = tuple(range(1, prompt + 1))
    return Request(name, ids, SamplingParams(max_tokens=tokens, n=n))


def expected(request: Request, index: int) -> list[int]:
    first = 1000 * (index + 1) + 7 * len(request.prompt_token_ids) + sum(request.request_id.encode())
    return [first + k for k in range(request.params.max_tokens or 0)]
