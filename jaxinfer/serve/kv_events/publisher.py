"""KV event publisher over ZMQ, in vLLM's format. No jax."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import logging
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio

from jaxinfer.serve.api.kv_events import OFF, KvEventsConfig
from jaxinfer.serve.kv_events.frames import END, Encoder, number_bytes
from jaxinfer.serve.kv_events.hub import BATCHES, Batch, Hub
from jaxinfer.serve.runtime.background import Background
from jaxinfer.serve.settings import ServeConfigError

_HWM = 100_000
"""Messages that wait for a slow subscriber; it misses later ones, and may request a replay."""
_REQUEST_BYTES = 64
_TURN = 64  # batches of a replay between two yields to the event loop, and in the queue of a slow peer
_REPLAYS = 16  # concurrent replays
_PAUSE_SECONDS, _SLOW_SECONDS = 0.02, 10.0
"""Seconds between two attempts to send to a peer that does not read, and until its replay is aborted."""

_log = logging.getLogger("jaxinfer.serve.kv_events")


class Publisher:
    """A PUB socket with all batches of a hub, and a ROUTER socket for replays.

    A message is [topic, number, batch]. To a request ["", number] the answers are ["", topic, number, batch], one for
    each kept batch from that number on, and a last one with number -1 and nothing else.

    Args:
        topic: returns the topic; called when a message is sent.

    Raises:
        ServeConfigError: an address is not available.
    """

    def __init__(
        self, config: KvEventsConfig, hub: Hub, topic: Callable[[], str], background: Background | None = None
    ) -> None:
        self._background, self._replays = background or Background(), dict[bytes, asyncio.Task[None]]()
        self._hub, self._topic, self._encoder = hub, topic, Encoder(config.kv_events_format)
        self._context = zmq.Context()
        self._kept: collections.deque[tuple[int, bytes]] = collections.deque(maxlen=BATCHES)
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self.endpoint = self.replay_endpoint = ""
        try:
            self._open(config)
        except ServeConfigError:
            self._context.destroy(linger=0)
            raise

    def _open(self, config: KvEventsConfig) -> None:
        if config.kv_events_endpoint != OFF:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.set_hwm(_HWM)
            self.endpoint = _bind(self._pub, "kv_events_endpoint", config.kv_events_endpoint)
        if config.kv_events_replay_endpoint not in (None, OFF):
            self._router = zmq.asyncio.Context(self._context).socket(zmq.ROUTER)
            self._router.set(zmq.MAXMSGSIZE, _REQUEST_BYTES)
            self._router.set_hwm(_TURN)
            self._router.set(zmq.ROUTER_MANDATORY, 1)  # a peer that does not read is an error, not a silent drop
            self.replay_endpoint = _bind(
                self._router, "kv_events_replay_endpoint", config.kv_events_replay_endpoint or ""
            )
            self._task = self._background.start("kv_events_replay", functools.partial(self._answer, self._router))
        self._hub.listen(self.publish)

    def publish(self, batch: Batch) -> None:
        """Send a batch without waiting."""
        payload = self._encoder.encode(batch)
        self._kept.append((batch.number, payload))
        if self._pub is not None:
            with contextlib.suppress(zmq.Again):
                self._pub.send_multipart((self._topic().encode(), number_bytes(batch.number), payload), zmq.NOBLOCK)

    async def _answer(self, router: zmq.asyncio.Socket) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != len(END):
                _log.warning("a request for KV events is none: %d frames", len(frames))
                continue
            if frames[0] in self._replays or len(self._replays) >= _REPLAYS:
                _log.warning("a replay of KV events is refused: its peer has one, or %d run", len(self._replays))
                continue
            replay = asyncio.create_task(self._replay(router, frames[0], int.from_bytes(frames[2])))
            self._replays[frames[0]] = replay

    async def _replay(self, router: zmq.asyncio.Socket, who: bytes, begin: int) -> None:
        """Send the kept batches from a number on. The replay of a peer that does not read is aborted."""
        topic = self._topic().encode()
        try:
            for place, (number, payload) in enumerate([each for each in self._kept if each[0] >= begin]):
                await _send(router, (who, b"", topic, number_bytes(number), payload))
                if place % _TURN == 0:
                    await asyncio.sleep(0)
            await _send(router, (who, b"", b"", END, b""))
        except TimeoutError:
            _log.warning("a replay of KV events is given up: its peer has read nothing for %g s", _SLOW_SECONDS)
        except zmq.ZMQError as error:
            _log.info("a replay of KV events has ended: %s", error.strerror)
        finally:
            del self._replays[who]

    async def stop(self) -> None:
        """Close the sockets."""
        tasks = [*([] if self._task is None else [self._task]), *self._replays.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._router is not None:
            self._router.close(linger=0)
        if self._pub is not None:
            self._pub.close(linger=200)
        await asyncio.to_thread(self._context.term)


async def _send(router: zmq.asyncio.Socket, frames: Sequence[bytes]) -> None:
    """Send to a peer as soon as it reads. `TimeoutError`: it does not."""
    async with asyncio.timeout(_SLOW_SECONDS):
        while True:
            try:
                await router.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                return


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, setting: str, endpoint: str) -> str:
    """Bind a socket and return its actual address."""
    asked = endpoint.removesuffix("0") + "*" if endpoint.endswith(":0") else endpoint
    if "[" in asked:
        socket.set(zmq.IPV6, 1)
    try:
        socket.bind(asked)
    except zmq.ZMQError as error:
        raise ServeConfigError(f"{setting}={endpoint}: cannot listen: {error.strerror}") from error
    found = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(found, bytes)
    return found.rstrip(b"\0").decode()
