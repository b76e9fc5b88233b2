"""Connection limits of the gRPC servers, and eviction of idle connections.

gRPC accepts connections itself without notification and closes those above its limit: clients that connect first and
stay could lock out all other clients. So the process's sockets are inspected periodically, and when few slots are left,
the connections that have been idle longest are shut down, those without an authorised call first.
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
_CLOSE_LOOK_SECONDS = 0.25  # if more than half of the slots of a port are used
_BUSY_SECONDS = 0.02  # after a pass that shut down connections
_FREE = 4  # one of this many slots is kept free for new connections
_WARN_SECONDS = 10.0  # between two log lines
_FOLDER = next((path for path in ("/proc/self/fd", "/dev/fd") if os.path.isdir(path)), None)

_Socket = tuple[int, int]
"""A descriptor and the socket's inode, since the descriptor may be reused for another socket."""


@dataclasses.dataclass(eq=False)
class Peer:
    """Calls on one connection.

    Attributes:
        running: number of calls in progress.
        serving: those of them that were authorised by a key, or run on a server without keys.
        last: end of the last such call on the monotonic clock; None: there was none.
    """

    running: int = 0
    serving: int = 0
    last: float | None = None


@dataclasses.dataclass(eq=False)
class _Connection:
    """A socket of this process.

    Attributes:
        peer: gRPC's name of the peer in the format of `plain`; None: not a client connection.
        seen: time of its first sighting.
    """

    port: int
    peer: str | None
    seen: float


class Connections:
    """Connections of several ports.

    Args:
        most: maximum connections of each port; gRPC itself must not accept more. May change until `run`.
        cut: called for each connection that is shut down.
    """

    def __init__(self, most: Mapping[int, int], cut: Callable[[], None] = lambda: None) -> None:
        self.most: dict[int, int] = dict(most)
        self._cut = cut
        self._peers: dict[str, Peer] = {}
        self._known: dict[_Socket, _Connection] = {}
        self._warned = -_WARN_SECONDS

    def begin(self, peer: str, *, known: bool) -> Peer:
        """Record the start of a call on ``peer``'s connection; ``known``: it is authorised. Return the argument for
        `end`."""
        found = self._peers.get(peer)
        if found is None:
            found = self._peers[peer] = Peer()
        found.running += 1
        found.serving += known
        return found

    def end(self, peer: str, found: Peer, *, known: bool) -> None:
        """Record the end of a call."""
        found.running -= 1
        found.serving -= known
        if known:
            found.last = time.monotonic()
        elif not found.running and found.last is None:
            self._peers.pop(peer, None)

    async def run(self) -> None:
        """Keep slots free, until cancelled."""
        while _FOLDER is not None:  # elsewhere open sockets cannot be listed, and only gRPC's own limit applies
            start = time.monotonic()
            busy = await self.look()
            took = time.monotonic() - start
            await asyncio.sleep(max(_BUSY_SECONDS, 10 * took) if busy else max(self._pause(), 100 * took))

    def _pause(self) -> float:
        """Return the seconds until the next pass, which costs a few microseconds for each socket of the process."""
        taken = collections.Counter(each.port for each in self._known.values() if each.peer is not None)
        return _CLOSE_LOOK_SECONDS if any(2 * taken[port] > most for port, most in self.most.items()) else _LOOK_SECONDS

    async def look(self) -> bool:
        """Shut down idle connections above the limits. Return whether any was shut down."""
        peers = {name: dataclasses.replace(peer) for name, peer in self._peers.items()}
        present, cut = await asyncio.to_thread(self._look, {plain(name): peer for name, peer in peers.items()})
        for name in peers:
            peer = self._peers.get(name)  # a call may have ended meanwhile
            if plain(name) not in present and peer is not None and not peer.running:
                del self._peers[name]
        for _ in range(cut):
            self._cut()
        return cut > 0

    def _look(self, peers: Mapping[str, Peer]) -> tuple[set[str | None], int]:
        """Return the present peers and the number of connections that were shut down."""
        self._known = self._listed(time.monotonic())
        present = {each.peer for each in self._known.values()}
        return present, sum(self._relieve(port, most - most // _FREE, peers) for port, most in self.most.items())

    def _listed(self, now: float) -> dict[_Socket, _Connection]:
        """Return all sockets of the process."""
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
        """Shut down a socket through a duplicate whose ends are checked again, since its descriptor may have been
        reused."""
        wanted = self._known.pop(name)
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(name[0])) as copy:
            if _ends_of(copy) == (wanted.port, wanted.peer):
                copy.shutdown(socket.SHUT_RDWR)
                return True
        return False


def _rank(connection: _Connection, peer: Peer | None) -> tuple[bool, int, float]:
    """Return the eviction rank: never-authorised connections first, idle before busy ones, then by idle time."""
    if peer is None:
        return False, 0, connection.seen
    kind = 2 if peer.last is not None else int(peer.running > 0)
    return peer.serving > 0, kind, peer.last or connection.seen


def _ends(number: int) -> tuple[int, str | None]:
    with socket.socket(fileno=os.dup(number)) as copy:
        return _ends_of(copy)


def _ends_of(copy: socket.socket) -> tuple[int, str | None]:
    """Return the local port, and the peer if there is one."""
    if copy.family not in (socket.AF_INET, socket.AF_INET6):
        return 0, None
    try:
        host, port, *_ = copy.getpeername()
    except OSError:  # a listening socket
        return copy.getsockname()[1], None
    return copy.getsockname()[1], f"{_ip(host)} {port}"


def plain(peer: str) -> str:
    """Convert gRPC's name of a peer, ``ipv4:127.0.0.1:80`` or ``ipv6:%5B::1%5D:80``, to address and port.

    Other names are returned unchanged: that of a connection that was reset at once has no address.
    """
    host, _, port = urllib.parse.unquote(peer).partition(":")[2].rpartition(":")
    try:
        return f"{_ip(host.strip('[]'))} {port}"
    except ValueError:
        return peer


def address_of(peer: str) -> str:
    """Return the key that identifies a client: its IPv4 address, or the /64 network of its IPv6 address."""
    if peer.startswith("ipv4:"):
        return peer[5:].rpartition(":")[0]
    if not peer.startswith("ipv6:") or plain(peer) == peer:
        return peer.partition(":")[0]
    ip = plain(peer).partition(" ")[0]
    return str(ipaddress.ip_network((ip, 64), strict=False)) if ":" in ip else ip


def _ip(host: str) -> str:
    """Normalize an address: without a zone, and IPv4-mapped IPv6 addresses as IPv4."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(ip, "ipv4_mapped", None) or ip)
