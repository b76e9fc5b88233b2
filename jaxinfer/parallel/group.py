"""Process group of one engine: its processes find each other, run the same calls, and end together.

Process 0 leads: it listens, decides, and sends each call to the other processes. A process that is gone, is silent, or
does not finish a call ends the group: the collectives of the others would wait for it forever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxinfer.parallel import frames
from jaxinfer.parallel.frames import Channel, ChannelError, Frame

BEAT_SECONDS = 0.5
TICK_SECONDS = 0.1
_RETRY_SECONDS = 0.5
_STRANGERS = 16  # concurrent handshakes
_NOTE, _REPORT = "note", "report"

_log = logging.getLogger("jaxinfer.parallel.group")

End = Callable[[str, bool], None]
"""Callback that ends this process at once, for a reason. True: threads may hang in a driver; log their stacks."""

Waiting = Callable[[], None]
"""Callback invoked periodically while a group is not complete."""


class GroupError(Exception):
    """A failure of a process to join the group. The message is one sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Membership:
    """Settings by which a process joins its group.

    Attributes:
        num_processes, process_id: 0 leads.
        address: HOST:PORT on which process 0 accepts the other processes.
        key: secret shared by all processes.
        timeout: seconds without a frame from a process, or without progress of the calls, after which the group ends.
            Compilation precedes the calls and does not count.
        settings: plain values that must be equal in all processes.
    """

    num_processes: int
    process_id: int
    address: str
    key: bytes = dataclasses.field(repr=False)
    timeout: float
    settings: Mapping[str, Any]

    @property
    def place(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)


class _Peer:
    """A connection to another process, and the state received from it.

    Attributes:
        heard: frames received so far.
        calls: calls sent to it.
        called, done: how many of these calls have returned there, and how many have their results there.
        notes: notes from it, see `Group.note`.
        report: its latest report, see `Group.report`; empty: it has sent none.
        lost: reason why the connection is over.
    """

    def __init__(self, number: int, channel: Channel) -> None:
        self.number, self.channel = number, channel
        self.heard = self.calls = self.called = self.done = 0
        self.lost: str | None = None
        self.report: Mapping[str, Any] = {}
        self.inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self.notes: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        _thread(self._read, f"jaxinfer-from-{number}")

    def _read(self) -> None:
        """Receive frames, also while the process is busy with earlier ones, so that a disconnect is noticed."""
        try:
            while True:
                frame = self.channel.receive()
                if frame.kind == "beat":
                    self.called, self.done = int(frame.values["called"]), int(frame.values["done"])
                elif frame.kind == _NOTE:
                    self.notes.put(frame.values)
                elif frame.kind == _REPORT:
                    self.report = frame.values
                else:
                    self.inbox.put(frame)
                self.heard += 1
        except (ChannelError, KeyError, TypeError, ValueError) as error:
            self.lost = str(error)

    def send(self, frame: Frame) -> None:
        """Send a frame; a failure is left to the watch thread, which also sees the end of the reader."""
        with contextlib.suppress(ChannelError):
            self.channel.send(frame)


class Group:
    """Membership of one process in a complete group. Made by `lead` and `join`.

    Args:
        end: called by a thread when the group is over.

    Attributes:
        sent: calls of process 0 so far: in other processes, those that this process has received.
    """

    def __init__(self, membership: Membership, peers: Sequence[_Peer], coordinator: str, end: End) -> None:
        self.membership, self.coordinator, self.sent = membership, coordinator, 0
        self._peers, self._end, self._ended = list(peers), end, threading.Lock()
        self._ledger = Ledger(self._answer, self.over)
        self._last, self._local_calls, self._ready = "", 0, False
        _thread(self._beat, "jaxinfer-beat")
        _thread(self._watch, "jaxinfer-watch")

    @property
    def leads(self) -> bool:
        return self.membership.process_id == 0

    @property
    def is_over(self) -> bool:
        return self._ended.locked()

    # ---- before the first call

    def least(self, number: int) -> int:
        """Return the minimum of the numbers of all processes. All must call it, in the same order."""
        if self.leads:
            found = min([number, *(int(self._next(peer, "number").values["number"]) for peer in self._peers)])
            self._broadcast(Frame("number", {"number": found}))
            return found
        self._broadcast(Frame("number", {"number": number}))
        return int(self._next(self._peers[0], "number").values["number"])

    def ready(self) -> None:
        """Report that this process has compiled everything; process 0 waits for the other processes, once."""
        if not self.leads:
            self._broadcast(Frame("ready"))
        elif not self._ready:
            for peer in self._peers:
                self._next(peer, "ready")
        self._ready = True

    def _next(self, peer: _Peer, kind: str) -> Frame:
        frame = peer.inbox.get()
        if frame.kind != kind:
            self.over(f"process {peer.number} said {frame.kind} where {kind} was due")
            threading.Event().wait()  # until the process ends
        return frame

    # ---- calls

    def call(
        self,
        name: str,
        values: Mapping[str, Any],
        arrays: Iterable[np.ndarray],
        processes: Collection[int] | None = None,
    ) -> None:
        """Send a call to the other processes that take part in it.

        Args:
            processes: processes that take part, which may include 0; None: all.
        """
        frame = Frame(name, values, tuple(arrays))
        for peer in self._peers:
            if processes is None or peer.number in processes:
                peer.calls += 1
                peer.send(frame)
        self._local_calls += processes is None or 0 in processes
        self._last = name
        self.sent += 1

    def calls(self) -> Iterable[Frame]:
        """Yield the calls of process 0 in another process; waits for each, without a timeout."""
        while True:
            frame = self._peers[0].inbox.get()
            self.sent += 1
            yield frame

    def launched(self, results: Any = None, wanted: bool = False) -> None:
        """Record that a call was launched; required after each call, see `Ledger.launched`."""
        self._ledger.launched(results, wanted)

    def _answer(self, arrays: list[np.ndarray]) -> None:
        self._broadcast(Frame("answer", arrays=tuple(arrays)))

    def answer(self, process: int) -> tuple[np.ndarray, ...]:
        """Wait for the next results that ``process`` sends to process 0, and return them."""
        return self._next(next(peer for peer in self._peers if peer.number == process), "answer").arrays

    # ---- notes

    def note(self, values: Mapping[str, Any]) -> None:
        """Send plain values (JSON) to all other processes, or from one of them to process 0; from any thread. Notes are
        no calls: they are in no order with these, and the caller does not wait for their effects."""
        self._broadcast(Frame(_NOTE, values))

    def notes(self) -> dict[int, Mapping[str, Any]]:
        """Wait for the next note of each process that sends any to this one; return them by process."""
        return {peer.number: peer.notes.get() for peer in self._peers}

    # ---- reports

    def report(self, values: Mapping[str, Any]) -> None:
        """Send plain values (JSON) to process 0, which keeps the latest; from any thread."""
        self._broadcast(Frame(_REPORT, values))

    def reports(self) -> list[Mapping[str, Any]]:
        """Return the latest report of each other process that has sent any. From any thread."""
        return [peer.report for peer in self._peers if peer.report]

    # ---- watching

    def _broadcast(self, frame: Frame) -> None:
        for peer in self._peers:
            peer.send(frame)

    def _beat(self) -> None:
        while not self._ended.locked():
            self._broadcast(_beat(self._ledger.called, self._ledger.done))
            time.sleep(BEAT_SECONDS)

    def _watch(self) -> None:
        """End the group when a process is gone or hangs. Time is ticks: none pass while this process hangs."""
        limit = self.membership.timeout
        heard, quiet = [-1] * len(self._peers), [0.0] * len(self._peers)
        counts, still = list[tuple[int, int]](), 0.0
        while not self._ended.locked():
            time.sleep(TICK_SECONDS)
            for place, peer in enumerate(self._peers):
                quiet[place] = 0.0 if peer.heard != heard[place] else quiet[place] + TICK_SECONDS
                heard[place] = peer.heard
                if peer.lost is not None:
                    self.over(f"process {peer.number} is gone: {peer.lost}")
                elif quiet[place] > limit:
                    self.over(f"process {peer.number} hangs: it said nothing for {limit:g} s", hangs=True)
            before, counts = counts, self._counts()
            still = still + TICK_SECONDS if self._outstanding(counts) and counts == before else 0.0
            if still > limit:
                what = f"no call was finished in {limit:g} s, the last was {self._last}"
                self.over(f"{self._slow(counts)}: {what}", hangs=True)

    def _counts(self) -> list[tuple[int, int]]:
        """Return the numbers of returned and of done calls, by process. Only process 0 knows them for all."""
        if not self.leads:
            return []
        return [(self._ledger.called, self._ledger.done), *((peer.called, peer.done) for peer in self._peers)]

    def _missing(self, counts: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Count the calls to each process that have not returned, and those that are not done."""
        sent = self._local_calls, *(peer.calls for peer in self._peers)
        return [(calls - called, calls - done) for calls, (called, done) in zip(sent, counts, strict=bool(counts))]

    def _outstanding(self, counts: list[tuple[int, int]]) -> bool:
        return any(done > 0 for _, done in self._missing(counts))

    def _slow(self, counts: list[tuple[int, int]]) -> str:
        """Name the processes with the most outstanding calls: no call is done anywhere before all have made it."""
        numbers, missing = [0, *(peer.number for peer in self._peers)], self._missing(counts)
        slow = [str(number) for number, most in zip(numbers, missing, strict=True) if most == max(missing)]
        return f"process {' and '.join(slow)} hangs" if len(slow) < len(numbers) else "all processes hang"

    def over(self, reason: str, hangs: bool = False) -> None:
        """End this process, and with it the group. The first reason counts."""
        if self._ended.acquire(blocking=False):
            self._end(reason, hangs)
            for peer in self._peers:
                peer.channel.close()


# ---- rendezvous


def lead(membership: Membership, end: End, waiting: Waiting) -> Group:
    """Run as process 0: wait until all other processes are connected.

    Raises:
        GroupError: the group's address cannot be listened on.
    """
    gathering = _Gathering(membership)
    try:
        reported: list[int] = []
        while missing := gathering.missing():
            if missing != reported:
                _log.info("waiting on %s for process %s", membership.address, ", ".join(map(str, missing)))
            reported = missing
            waiting()
            time.sleep(TICK_SECONDS)
    finally:
        gathering.close()  # a late process must not connect
    peers, coordinator = gathering.peers(), _free_address(membership.place[0])
    for peer in peers:
        peer.send(Frame("begin", {"coordinator": coordinator}))
    return Group(membership, peers, coordinator, end)


def join(membership: Membership, end: End, waiting: Waiting) -> Group:
    """Run as another process: connect to process 0, with retries, and wait until the group is complete.

    Raises:
        GroupError: process 0 rejects this process, with the reason.
    """
    _log.info("looking for process 0 on %s", membership.address)
    while True:
        waiting()
        try:
            connected = socket.create_connection(membership.place, timeout=frames.HANDSHAKE_SECONDS)
            peer = _Peer(0, frames.call(connected, membership.key))
        except ChannelError as error:
            _log.warning("process 0 on %s: %s", membership.address, error)
            time.sleep(_RETRY_SECONDS)
            continue
        except OSError:
            time.sleep(_RETRY_SECONDS)
            continue
        peer.send(Frame("join", {"process_id": membership.process_id, "settings": dict(membership.settings)}))
        if (begin := _until_begun(peer, membership.timeout, waiting)) is not None:
            return Group(membership, [peer], str(begin.values["coordinator"]), end)
        peer.channel.close()


def _until_begun(peer: _Peer, timeout: float, waiting: Waiting) -> Frame | None:
    """Wait until process 0 has all processes; None: it is gone or silent."""
    heard, quiet = peer.heard, 0.0
    while peer.lost is None and quiet <= timeout:
        peer.send(_beat())
        try:
            frame = peer.inbox.get(timeout=BEAT_SECONDS)
        except queue.Empty:
            waiting()
            quiet = quiet + BEAT_SECONDS if heard == peer.heard else 0.0
            heard = peer.heard
            continue
        if frame.kind == "refused":
            raise GroupError(str(frame.values["why"]))
        return frame
    return None


class _Gathering:
    """Connections of the other processes, which may come and go until all are present."""

    def __init__(self, membership: Membership) -> None:
        self._membership, self._lock = membership, threading.Lock()
        self._peers: dict[int, _Peer] = {}
        self._room = threading.BoundedSemaphore(_STRANGERS)
        self._closed = False
        host, port = membership.place
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listening = socket.create_server((host, port), family=family, backlog=_STRANGERS)
        except OSError as error:
            raise GroupError(f"coordinator_address = {membership.address} cannot be listened on: {error}") from error
        _thread(self._accept, "jaxinfer-gathering")

    def missing(self) -> list[int]:
        """Return the ids of the processes that are not connected; send a heartbeat to the connected ones."""
        with self._lock:
            for number, peer in list(self._peers.items()):
                peer.send(_beat())
                if peer.lost is not None:
                    del self._peers[number]
            return [number for number in range(1, self._membership.num_processes) if number not in self._peers]

    def peers(self) -> list[_Peer]:
        with self._lock:
            return [peer for _, peer in sorted(self._peers.items())]

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listening.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connected, address = self._listening.accept()
            except OSError:  # closed; or one accept failed, such as by too many connections
                time.sleep(TICK_SECONDS)
                continue
            if self._room.acquire(blocking=False):
                _thread(self._welcome, "jaxinfer-welcome", connected, address)
            else:
                connected.close()

    def _welcome(self, connected: socket.socket, address: Any) -> None:
        try:
            channel = frames.greet(connected, self._membership.key)
        except ChannelError as error:
            _log.warning("a caller from %s is refused: %s", address[0], error)
            return
        finally:
            self._room.release()
        peer = _Peer(-1, channel)
        try:
            self._take(peer, peer.inbox.get(timeout=frames.HANDSHAKE_SECONDS))
        except queue.Empty:
            channel.close()

    def _take(self, peer: _Peer, frame: Frame) -> None:
        number, settings = frame.values.get("process_id"), frame.values.get("settings")
        if (why := self._refusal(frame.kind, number, settings)) is not None:
            _log.warning("a process is refused: %s", why)
            peer.send(Frame("refused", {"why": why}))
            peer.channel.close()
            return
        assert isinstance(number, int)
        peer.number = number
        with self._lock:
            before = self._peers.get(number)
            self._peers[number] = peer
        if before is not None:  # the process was restarted before its disconnect was noticed
            before.channel.close()

    def _refusal(self, kind: str, number: object, settings: object) -> str | None:
        if kind != "join" or not isinstance(settings, dict):
            return "it does not say who it is"
        total, mine = self._membership.num_processes, self._membership.settings
        if not isinstance(number, int) or not 0 < number < total:
            return f"process_id = {number} must be from 1 to {total - 1}"
        for name in sorted({*mine, *settings}):
            if mine.get(name) != settings.get(name):
                theirs = f"{name} = {settings.get(name)} of process {number}"
                return f"{theirs} must be {mine.get(name)}, as in process 0"
        return None


def _beat(called: int = 0, done: int = 0) -> Frame:
    return Frame("beat", {"called": called, "done": done})


def _free_address(host: str) -> str:
    """Return a free address. Each life of a group uses a new one, so that no process of an earlier life can join it."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family) as found:
        port = found.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _thread(target: Callable[..., None], name: str, *args: Any) -> None:
    threading.Thread(target=target, args=args, name=name, daemon=True).start()


class Ledger:
    """Counts of the calls that returned in this process, and of those ``done``: their results are on its devices.

    Args:
        answer: callback for the results that process 0 waits for, on the host.
        failed: callback for the error message.
    """

    def __init__(self, answer: Callable[[list[np.ndarray]], None], failed: Callable[[str], None]) -> None:
        self.called, self.done, self._answer, self._failed = 0, 0, answer, failed
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="jaxinfer-ledger", daemon=True).start()

    def launched(self, results: Any, wanted: bool = False) -> None:
        """Record that the next call was launched. ``results``: a tree of arrays that are never donated, or None if a
        later call completes after it; ``wanted``: process 0 waits for them."""
        self.called += 1
        self._calls.put((results, wanted))

    def _run(self) -> None:
        while True:
            results, wanted = self._calls.get()
            try:
                jax.block_until_ready(results)
                if wanted:
                    self._answer([np.asarray(leaf) for leaf in jax.tree.leaves(results)])
            except RuntimeError as error:  # JAX's own errors are RuntimeErrors
                self._failed(f"a program failed: {error}")
                return
            del results
            self.done += 1
