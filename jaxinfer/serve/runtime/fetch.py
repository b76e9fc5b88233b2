"""Fetching of images from URLs of requests, from an allow-list of hosts and from public addresses only. No jax.

A URL in a request makes this machine, which may reach what its clients must not, open a connection. So hosts are
allowed by name; a host's addresses are resolved here, checked, and connected to by number, so that no second answer of
its name server counts; and a redirect is checked like the first URL.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import ipaddress
import re
import socket
import ssl
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import httptools

from jaxinfer.images.processor import ImageError
from jaxinfer.serve.runtime.fair_pool import FairPool

DOMAIN = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?")
"""An allowed host, ``*.`` with the hosts below a name, or either with a port."""

_PORTS = {"http": 80, "https": 443}
_PRINTABLE = re.compile(r"[\x21-\x7e]{1,8192}")
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_HEAD_BYTES = 64 << 10
_READ_BYTES = 64 << 10
_WAITING = 256

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host."""


class Target(NamedTuple):
    """What a URL asks for."""

    scheme: str
    host: str
    port: int
    path: str


@dataclasses.dataclass(frozen=True)
class FetchLimits:
    """Limits of a fetch: bytes of the body, seconds, redirects; and fetches at once, of all and of one tenant."""

    bytes: int = 10 << 20
    seconds: float = 10.0
    redirects: int = 3
    at_once: int = 16
    share: int = 4


class MediaFetcher:
    """Fetches images from allowed hosts.

    Args:
        domains: allowed hosts, each as `DOMAIN`; without a port, the default ports of http and https are allowed.
        resolve: default: the system's resolver.
        connect: opens a connection to an address and port, with the host whose certificate is required (None: no TLS).
    """

    def __init__(
        self,
        domains: Sequence[str],
        limits: FetchLimits = FetchLimits(),
        *,
        resolve: Resolve | None = None,
        connect: Callable[[str, int, str | None], Awaitable[Connection]] | None = None,
    ) -> None:
        self._domains, self._limits = [domain.lower() for domain in domains], limits
        self._resolve, self._connect = resolve or self._resolved, connect or _connected
        self._turns = FairPool(range(limits.at_once), limits.share, _WAITING, "URLs wait to be fetched")
        self._threads = concurrent.futures.ThreadPoolExecutor(limits.at_once, "jaxinfer-resolver")

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    async def fetch(self, url: str, tenant: str = "") -> bytes:
        """Return the body of a successful answer.

        Raises:
            ImageError: the URL is not allowed, or its answer is none; one sentence, which names no address.
            QueueFullError: too many URLs wait.
        """
        turn = await self._turns.take(tenant)
        try:
            async with asyncio.timeout(self._limits.seconds):
                return await self._followed(url)
        except TimeoutError as error:
            raise ImageError(f"the URL was not read within {self._limits.seconds:g} s") from error
        finally:
            self._turns.give(tenant, turn)

    async def _followed(self, url: str) -> bytes:
        for _ in range(self._limits.redirects + 1):
            target = self._allowed(url)
            found = await self._get(target, await self._address(target))
            if found.status not in _REDIRECTS:
                return found.whole(target.host)
            if not found.location:
                raise ImageError(f"{target.host} redirects to nothing")
            url = urllib.parse.urljoin(url, found.location)
        raise ImageError(f"the URL redirects more than {self._limits.redirects} times")

    def _allowed(self, url: str) -> Target:
        """Return what a URL asks for, if that is allowed."""
        if not _PRINTABLE.fullmatch(url):
            raise ImageError("a URL must be at most 8192 printable ASCII characters without spaces")
        try:
            parts = urllib.parse.urlsplit(url)
            scheme, host, port = parts.scheme.lower(), (parts.hostname or "").rstrip("."), parts.port
        except ValueError as error:
            raise ImageError("the URL is invalid") from error
        if scheme not in _PORTS:
            raise ImageError(f"URLs must be data:, http: or https:, not {scheme[:20] or 'without a scheme'}")
        if parts.username is not None or parts.password is not None:
            raise ImageError("a URL must not have a user name or a password")
        port = _PORTS[scheme] if port is None else port
        if not any(_matches(domain, host, port) for domain in self._domains):
            raise ImageError(f"{host[:100]}:{port} is not among allowed_media_domains")
        path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        return Target(scheme, host, port, path if path.startswith("/") else f"/{path}")

    async def _address(self, target: Target) -> str:
        """Return an address of the host, all of which must be public."""
        try:
            found = await self._resolve(target.host, target.port)
        except OSError as error:
            raise ImageError(f"{target.host} cannot be resolved") from error
        if not found or not all(map(is_public, found)):
            raise ImageError(f"{target.host} has no public address, or others beside it")
        return found[0]

    async def _resolved(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        kind = socket.SOCK_STREAM
        found = await loop.run_in_executor(self._threads, lambda: socket.getaddrinfo(host, port, type=kind))
        return [str(address[0]) for *_, address in found]

    async def _get(self, target: Target, address: str) -> _Answer:
        answer = _Answer(self._limits.bytes)
        try:
            name = target.host if target.scheme == "https" else None
            reader, writer = await self._connect(address, target.port, name)
            try:
                writer.write(_request(target))
                await writer.drain()
                while not answer.ended:
                    answer.feed(await reader.read(_READ_BYTES))
            finally:
                writer.close()
        except (OSError, httptools.HttpParserError) as error:  # OSError: TLS, too
            raise ImageError(f"{target.host} cannot be read: {type(error).__name__}") from error
        return answer


class _Answer:
    """An HTTP response while it is read.

    Attributes:
        ended: whether nothing more is to be read: it is complete, or a redirect.
    """

    def __init__(self, most: int) -> None:
        self._most, self._body, self._parser = most, bytearray(), httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._head_bytes, self._in_body, self._complete, self.ended = 0, False, False, False

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    @property
    def location(self) -> str:
        return self._headers.get("location", "")

    def feed(self, data: bytes) -> None:
        """Take the next bytes; none: the connection was closed.

        Raises:
            ImageError: the answer is too large or truncated.
            HttpParserError: it is no HTTP.
        """
        if not data:
            sized = {"content-length", "transfer-encoding"} & self._headers.keys()
            if not self._in_body or sized:
                raise ImageError("the answer of the URL's host is truncated")
            self.ended = True
            return
        if not self._in_body:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES + _READ_BYTES:
                raise ImageError("the answer of the URL's host begins with too many headers")
        self._parser.feed_data(data)
        if len(self._body) > self._most or self._declared > self._most:
            raise ImageError(f"the URL's image has more than {self._most} bytes")
        self.ended = self._complete or (self._in_body and self.status in _REDIRECTS)

    @property
    def _declared(self) -> int:
        length = self._headers.get("content-length", "0")
        return int(length[:20]) if length.isdecimal() else 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._complete = True

    def whole(self, host: str) -> bytes:
        """Return the body.

        Raises:
            ImageError: the answer is an error, or compressed.
        """
        if self.status != 200:
            raise ImageError(f"{host} answers with status {self.status}")
        if self._headers.get("content-encoding", "identity").lower() != "identity":
            raise ImageError(f"{host} answers with a compressed body")
        return bytes(self._body)


def is_public(address: str) -> bool:
    """Whether an address belongs to the public internet: not loopback, private, link-local, multicast or reserved, also
    not within an IPv6 address that leads to an IPv4 one."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # with a scope: link-local
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return is_public(str(found.ipv4_mapped))
        if found.sixtofour is not None or found.teredo is not None or found.is_site_local:
            return False
    return found.is_global and not (found.is_multicast or found.is_reserved)


def _matches(domain: str, host: str, port: int) -> bool:
    name, _, own = domain.partition(":")
    if (int(own) != port) if own else port not in _PORTS.values():
        return False
    return host.endswith(name[1:]) if name.startswith("*.") else host == name


def _request(target: Target) -> bytes:
    host = target.host if target.port == _PORTS[target.scheme] else f"{target.host}:{target.port}"
    lines = (
        f"GET {target.path} HTTP/1.1",
        f"Host: {host}",
        "User-Agent: jaxinfer",
        "Accept: image/*",
        "Accept-Encoding: identity",
        "Connection: close",
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode("ascii")


async def _connected(address: str, port: int, name: str | None) -> Connection:
    if name is None:
        return await asyncio.open_connection(address, port)
    return await asyncio.open_connection(address, port, ssl=ssl.create_default_context(), server_hostname=name)
