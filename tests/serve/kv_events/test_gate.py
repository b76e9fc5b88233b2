"""Randomised test: a subscriber's state equals the cached blocks despite lost or duplicate messages and restarts."""

from __future__ import annotations

import itertools
import random

import pytest

from jaxinfer.kv.manager import KVConfig
from jaxinfer.serve.core.kv_event_encoder import KvEventEncoder
from jaxinfer.serve.core.messages import decode_from_core, encode
from jaxinfer.serve.grpc.vllm.events import batch_message, chunk_message
from jaxinfer.serve.kv_events import hub as hubs
from jaxinfer.serve.kv_events.frames import Encoder
from jaxinfer.serve.kv_events.hub import Batch, Chunk, Hub, Subscription
from tests.kv.test_kv_machine import PAGE, PAGES, RARE, SLOTS, WEIGHTS, WIDTH, Cache, _allowed, _arguments
from tests.serve.kv_events.subscribers import DECODERS, Router, truth

KEPT = 40  # batches; few, so that subscribers often miss some
RULES = WEIGHTS | RARE | {"look": 8, "core": 0.05, "doors": 0.02, "subscriber": 2.0}


class GrpcSubscriber:
    """Reads a stream that is sometimes cut, and resubscribes at its cursor or earlier."""

    def __init__(self, world: World) -> None:
        self.world, self.router = world, Router()
        self.stream: Subscription | None = None
        self.chunks = self.batches = 0

    def act(self, rng: random.Random) -> None:
        match rng.choice(["read", "read", "read", "cut", "forget", "back"]):
            case "read":
                self.read(rng.randint(1, 30))
            case "cut":
                self.leave()
            case "forget":
                self.leave()
                self.router = Router()
            case "back":  # resubscribes before its cursor
                self.leave()
                self.join(max(1, self.router.cursor - rng.randint(0, 5)) if self.router.cursor else 0)

    def leave(self) -> None:
        if self.stream is not None:
            self.stream.close()
        self.stream = None

    def join(self, begin: int) -> None:
        self.stream = self.world.hub.subscribe(begin)

    def read(self, most: int) -> None:
        for _ in range(most):
            if self.stream is None:
                self.join(self.router.cursor)
            assert self.stream is not None
            if self.stream._lagged:
                self.leave()
                continue
            if not self.stream._items:
                return
            item = self.stream._items.popleft()
            self.chunks += isinstance(item, Chunk)
            self.batches += isinstance(item, Batch)
            message = chunk_message(item) if isinstance(item, Chunk) else batch_message(item)
            assert self.router.take_message(type(message).FromString(message.SerializeToString())), "a gap"

    def check(self) -> None:
        while self.stream is None or self.stream._lagged or self.stream._items:
            self.read(1000)
        assert self.router.known == self.world.told
        assert self.router.cursor == self.world.hub.number


class ZmqSubscriber:
    """Receives frames with losses and duplicates, and requests missing ones. It has to start with the API server."""

    def __init__(self, world: World, form: str) -> None:
        self.world, self.form, self.encoder = world, form, Encoder(form)
        self.router, self.lost = Router(), 0
        self.frames: list[tuple[int, bytes]] = []

    def sent(self, batch: Batch) -> None:
        self.frames.append((batch.number, self.encoder.encode(batch)))

    def act(self, rng: random.Random) -> None:
        for number, payload in self.frames:
            if rng.random() < 0.2:
                self.lost += 1
                continue
            for _ in range(1 + (rng.random() < 0.1)):
                self._take(number, payload)
        self.frames.clear()

    def _take(self, number: int, payload: bytes) -> None:
        decoded = DECODERS[self.form].decode(payload)
        if not self.router.cursor and type(decoded.events[0]).__name__ not in ("AllBlocksCleared", "LegacyCleared"):
            return
        if not self.router.take_events(number, decoded.events):
            self._ask()

    def _ask(self) -> None:
        kept = self.world.hub.since(self.router.cursor + 1)
        if kept is None:  # over ZMQ the only recovery is to restart at the next clear event
            self.router = Router()
            return
        for batch in kept:
            assert self.router.take_events(batch.number, DECODERS[self.form].decode(self.encoder.encode(batch)).events)

    def check(self) -> None:
        """Request missing batches; the state must be complete if the hub still has all of them."""
        for number, payload in self.frames:
            self._take(number, payload)
        self.frames.clear()
        self._ask()
        if self.router.cursor:
            assert self.router.known == self.world.told


class World:
    """A sequence of engines and of API servers, and subscribers that outlive them."""

    def __init__(self, config: KVConfig, rng: random.Random) -> None:
        self.config, self.rng, self.now = config, rng, itertools.count(1_000_000)
        self.grpc = [GrpcSubscriber(self) for _ in range(3)]
        self.zmq: list[ZmqSubscriber] = []
        self.doors()

    def doors(self) -> None:
        """Restart the API server, and with it the engine."""
        for subscriber in self.grpc:
            subscriber.leave()
        self.hub = Hub(clock=lambda: float(next(self.now)))
        self.zmq = [ZmqSubscriber(self, form) for form in DECODERS]
        for each in self.zmq:
            self.hub.listen(each.sent)
        self.hub.begin()
        self.new_core()

    def core(self) -> None:
        """Kill the engine and start another one."""
        self.hub.begin()
        self.told = {}
        for subscriber in self.grpc:
            subscriber.check()
        self.hub.begin()
        self.new_core()

    def new_core(self) -> None:
        class Configured(Cache):
            config = self.config

        self.machine, self.told = Configured(), {}
        self.telling = KvEventEncoder([self.machine.kv.start_journal()], None)

    def look(self) -> None:
        """End a step: its changes are sent to the API server."""
        for message in self.telling.messages():
            self.hub.take(decode_from_core(encode(message)))
        self.told = truth(self.machine.kv)

    def subscriber(self) -> None:
        self.rng.choice([*self.grpc, *self.zmq]).act(self.rng)

    def step(self) -> None:
        (name,) = self.rng.choices(list(RULES), list(RULES.values()))
        if name in ("look", "core", "doors", "subscriber"):
            getattr(self, name)()
        elif name in ("step", "reset") or _allowed(self.machine, name):
            getattr(self.machine, name)(**_arguments(self.rng)[name])

    def check(self) -> None:
        self.look()
        assert {
            hubs_low(digest): block for digest, block in self.hub.mirror().blocks.items()
        }.keys() == self.told.keys()
        for subscriber in [*self.grpc, *self.zmq]:
            subscriber.check()


def hubs_low(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], signed=True)


@pytest.mark.parametrize("windows", [(None,), (8,), (None, 6)], ids=str)
@pytest.mark.parametrize("host_pages", [0, 9])
@pytest.mark.parametrize("steps", [1500, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_subscriber_knows_exactly_what_is_cached(monkeypatch, windows, host_pages, steps):
    monkeypatch.setattr(hubs, "BATCHES", KEPT)
    monkeypatch.setattr(hubs, "CHUNK_BLOCKS", 3)
    world = World(KVConfig(PAGES, PAGE, SLOTS, WIDTH, windows, host_pages), random.Random(repr((windows, host_pages))))
    for count in range(steps):
        world.step()
        if count % 50 == 0:
            world.check()
    world.check()
    assert sum(each.chunks for each in world.grpc) > 10
    assert sum(each.batches for each in world.grpc) > 100
