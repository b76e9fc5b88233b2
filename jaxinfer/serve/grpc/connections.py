"""The connections of gRPC's doors: how many there are, and which give way when others come.

gRPC accepts them itself, tells nobody, and closes what comes beyond its bound: whoever came first and stays could keep
everybody else out. So there is a look at the process's own sockets now and then, and where room becomes scarce, the
connections that have waited longest for nothing are shut down, those first over which nobody has shown a key.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import ipaddress
import logging
import os
import socket
import stat
import time
import urllib.parse
from collections.abc import Callable, Mapping

_log = logging.getLogger("jaxinfer.serve")

_LOOK_SECONDS = 1.0
_CLOSE_LOOK_SECONDS = 0.25  # where half of the places of a port are taken
_BUSY_SECONDS = 0.02  # after a look that had to shut some down
_FREE = 4  # one of so many places is kept free for those who come
_WARN_SECONDS = 10.0  # between two lines of the log
_FOLDER = next((path for path in ("/proc/self/fd", "/dev/fd") if os.path.isdir(path)), None)

_Socket = tuple[int, int]
"""A descriptor, and the socket's number in the kernel: another one may have the descriptor later."""


@dataclasses.dataclass(eq=False)
class Peer:
    """Calls over one connection.

    Attributes:
        running: calls over it now.
        serving: those of them that were allowed by a key, or without keys.
        last: when such a call ended last; None: there was none.
    """

    running: int = 0
    serving: int = 0
    last: float | None = None


@dataclasses.dataclass(eq=False)
class _Connection:
    """A socket of ours.

    Attributes:
        peer: as gRPC writes it, in `plain`'s form; None: no connection of these doors.
        seen: when first.
    """

    port: int
    peer: str | None
    seen: float


class Connections:
    """Connections of some ports.

    Args:
        most: of each port; gRPC itself is to take no more. May change until `run`.
        cut: told of each that is shut down.
    """

    def __init__(self, most: Mapping[int, int], cut: Callable[[], None] = lambda: None) -> None:
        self.most: dict[int, int] = dict(most)
        self._cut = cut
        self._peers: dict[str, Peer] = {}
        self._known: dict[_Socket, _Connection] = {}
        self._warned = -_WARN_SECONDS

    def begin(self, peer: str, *, known: bool) -> Peer:
        """A call comes over ``peer``'s connection; ``known``: from somebody who may. What `end` must be told."""
        found = self._peers.get(peer)
        if found is None:
            found = self._peers[peer] = Peer()
        found.running += 1
        found.serving += known
        return found

    def end(self, peer: str, found: Peer, *, known: bool) -> None:
        """The call has ended."""
        found.running -= 1
        found.serving -= known
        if known:
            found.last = time.monotonic()
        elif not found.running and found.last is None:
            self._peers.pop(peer, None)

    async def run(self) -> None:
        """Keep places free, until cancelled."""
        while _FOLDER is not None:  # else there is no such list of what is open, and gRPC's own bound is all there is
            start = time.monotonic()
            busy = await self.look()
            took = time.monotonic() - start
            await asyncio.sleep(max(_BUSY_SECONDS, 10 * took) if busy else max(self._pause(), 100 * took))

    def _pause(self) -> float:
        """Seconds until the next look: it costs some microseconds for each socket of the process."""
        taken = collections.Counter(each.port for each in self._known.values() if each.peer is not None)
        return _CLOSE_LOOK_SECONDS if any(2 * taken[port] > most for port, most in self.most.items()) else _LOOK_SECONDS

    async def look(self) -> bool:
        """Shut down what is too much; whether anything was."""
        peers = {name: dataclasses.replace(peer) for name, peer in self._peers.items()}
        present, cut = await asyncio.to_thread(self._look, {plain(name): peer for name, peer in peers.items()})
        for name in peers:
            if plain(name) not in present and not self._peers[name].running:
                del self._peers[name]
        for _ in range(cut):
            self._cut()
        return cut > 0

    def _look(self, peers: Mapping[str, Peer]) -> tuple[set[str | None], int]:
        """The peers that there are, and how many were shut down."""
        self._known = self._listed(time.monotonic())
        present = {each.peer for each in self._known.values()}
        return present, sum(self._relieve(port, most - most // _FREE, peers) for port, most in self.most.items())

    def _listed(self, now: float) -> dict[_Socket, _Connection]:
        """Every socket of the process."""
        assert _FOLDER is not None
        found = {}
        for number in map(int, os.listdir(_FOLDER)):
            with contextlib.suppress(OSError):  # closed meanwhile
                status = os.fstat(number)
                if stat.S_ISSOCK(status.st_mode):
                    name = number, status.st_ino
                    found[name] = self._known.get(name) or _Connection(*_ends(number), now)
        return found

    def _relieve(self, port: int, enough: int, peers: Mapping[str, Peer]) -> int:
        ours = {name: each for name, each in self._known.items() if each.port == port and each.peer is not None}
        if len(ours) <= enough:
            return 0
        ranked = sorted((_rank(each, peers.get(each.peer or "")), name) for name, each in ours.items())
        idle = [name for (serves, _, _), name in ranked[: len(ours) - enough] if not serves]
        cut = sum(self._shut(name) for name in idle)
        if cut and time.monotonic() - self._warned > _WARN_SECONDS:
            self._warned = time.monotonic()
            _log.warning("port %d: %d of %d connections were idle longest and gave way", port, cut, len(ours))
        return cut

    def _shut(self, name: _Socket) -> bool:
        """Shut a socket down, through a duplicate that is looked at once more: its number may be another's by now."""
        wanted = self._known.pop(name)
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(name[0])) as copy:
            if _ends_of(copy) == (wanted.port, wanted.peer):
                copy.shutdown(socket.SHUT_RDWR)
                return True
        return False


def _rank(connection: _Connection, peer: Peer | None) -> tuple[bool, int, float]:
    """Rank who gives way first: strangers before those who were served, and the idle before those who have calls; of
    each kind who has waited longest."""
    if peer is None:
        return False, 0, connection.seen
    kind = 2 if peer.last is not None else int(peer.running > 0)
    return peer.serving > 0, kind, peer.last or connection.seen


def _ends(number: int) -> tuple[int, str | None]:
    with socket.socket(fileno=os.dup(number)) as copy:
        return _ends_of(copy)


def _ends_of(copy: socket.socket) -> tuple[int, str | None]:
    """Return our port, and the peer if there is one."""
    if copy.family not in (socket.AF_INET, socket.AF_INET6):
        return 0, None
    try:
        host, port, *_ = copy.getpeername()
    except OSError:  # a listener
        return copy.getsockname()[1], None
    return copy.getsockname()[1], f"{_ip(host)} {port}"


def plain(peer: str) -> str:
    """gRPC's name of a peer, ``ipv4:127.0.0.1:80`` or ``ipv6:%5B::1%5D:80``, as address and port."""
    host, _, port = urllib.parse.unquote(peer).partition(":")[2].rpartition(":")
    return f"{_ip(host.strip('[]'))} {port}"


def address_of(peer: str) -> str:
    """Name who counts as one client: an IPv4 address, or the network of an IPv6 one that a single customer has."""
    if peer.startswith("ipv4:"):
        return peer[5:].rpartition(":")[0]
    if not peer.startswith("ipv6:"):
        return peer.partition(":")[0]
    ip = _ip(plain(peer).partition(" ")[0])
    return str(ipaddress.ip_network((ip, 64), strict=False)) if ":" in ip else ip


def _ip(host: str) -> str:
    """One form for each address: without a zone, and an IPv4 address within IPv6 as itself."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(ip, "ipv4_mapped", None) or ip)
