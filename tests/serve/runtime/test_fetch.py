"""Tests of fetching images: what is allowed, where a connection goes, and the limits of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from jaxinfer.images.processor import ImageError
from jaxinfer.serve.runtime.fetch import FetchLimits, MediaFetcher, is_public

HOST = "images.example.com"
PUBLIC, OTHER = "93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"
URL = f"http://{HOST}/a.png?b=c"
LIMITS = FetchLimits(bytes=1000, seconds=20.0)

Answers = Callable[[bytes], bytes]


class Net:
    """A network: names with their addresses, and one local server that all connections end at.

    Attributes:
        names: addresses by host, one list for each lookup, the last one for all that follow.
        answer: returns the answer to a request; None: there is none, and the connection stays open.
        connected: addresses, ports and names that connections were opened to.
        asked: heads of requests.
    """

    def __init__(self, answer: Callable[[bytes], bytes | None], **names: Sequence[Sequence[str]]) -> None:
        self.names: dict[str, list[Sequence[str]]] = {HOST: [[PUBLIC]], **{k: list(v) for k, v in names.items()}}
        self.answer = answer
        self.connected: list[tuple[str, int, str | None]] = []
        self.asked: list[bytes] = []
        self.lookups = 0

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.lookups += 1
        found = self.names.get(host)
        if found is None:
            raise OSError("unknown")
        return found.pop(0) if len(found) > 1 else found[0]

    async def connect(
        self, address: str, port: int, name: str | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.connected.append((address, port, name))
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.asked.append(head)
            answer = self.answer(head)
            if answer is None:
                await reader.read()
            else:
                writer.write(answer)
                await writer.drain()
        writer.close()

    @contextlib.asynccontextmanager
    async def fetcher(
        self, domains: Sequence[str] = (HOST,), limits: FetchLimits = LIMITS
    ) -> AsyncIterator[MediaFetcher]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        made = MediaFetcher(domains, limits, resolve=self.resolve, connect=self.connect)
        try:
            yield made
        finally:
            made.close()
            server.close()


def ok(body: bytes, *headers: str) -> bytes:
    lines = "".join(f"{line}\r\n" for line in (f"Content-Length: {len(body)}", *headers))
    return b"HTTP/1.1 200 OK\r\n" + lines.encode() + b"\r\n" + body


def redirect(to: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()


def fetched(net: Net, url: str = URL, domains: Sequence[str] = (HOST,), limits: FetchLimits = LIMITS) -> bytes:
    async def test() -> bytes:
        async with net.fetcher(domains, limits) as fetcher:
            return await fetcher.fetch(url)

    return asyncio.run(test())


def refused(net: Net, url: str = URL, domains: Sequence[str] = (HOST,), limits: FetchLimits = LIMITS) -> str:
    with pytest.raises(ImageError) as error:
        fetched(net, url, domains, limits)
    return str(error.value)


def test_an_image_is_fetched_from_the_address_that_was_checked() -> None:
    net = Net(lambda head: ok(b"image"))
    assert fetched(net) == b"image"
    assert net.connected == [(PUBLIC, 80, None)]
    assert net.asked[0].startswith(b"GET /a.png?b=c HTTP/1.1\r\nHost: images.example.com\r\n")
    assert net.lookups == 1


def test_https_requires_the_hosts_certificate() -> None:
    net = Net(lambda head: ok(b"image"))
    fetched(net, f"HTTPS://{HOST.upper()}.#fragment")
    assert net.connected == [(PUBLIC, 443, HOST)]
    assert net.asked[0].startswith(b"GET / HTTP/1.1\r\n")


@pytest.mark.parametrize(
    "body",
    [
        b"HTTP/1.1 200 OK\r\n\r\nimage",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nim\r\n3\r\nage\r\n0\r\n\r\n",
        ok(b"image", "Content-Encoding: identity"),
    ],
    ids=["until-closed", "chunked", "identity"],
)
def test_forms_of_an_answer(body: bytes) -> None:
    assert fetched(Net(lambda head: body)) == b"image"


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/a.png",
        "http://evil-images.example.com.evil.org/",
        f"http://{HOST}.evil.org/",
        f"http://evil.org/{HOST}",
        f"http://evil.org#{HOST}",
        f"http://evil.org?{HOST}",
        f"http://{HOST}@evil.org/",
        f"http://user@{HOST}/",
        f"http://user:pass@{HOST}/",
        f"http://{HOST}:22/",
        f"http://{HOST}:99999/",
        f"http://{HOST}:x/",
        f"ftp://{HOST}/a.png",
        f"gopher://{HOST}/a.png",
        "file:///etc/passwd",
        f"//{HOST}/a.png",
        f"{HOST}/a.png",
        f"http://{HOST}/a b",
        f"http://{HOST}/a\r\nX: y",
        f"http://{HOST}/\0",
        "http://[::1]/",
        "http://127.0.0.1/",
        "http://2130706433/",
        "http://ımages.example.com/",
        f"http://{HOST}/{'a' * 9000}",
        "",
    ],
)
def test_urls_that_are_not_allowed_open_no_connection(url: str) -> None:
    net = Net(lambda head: ok(b"image"))
    assert refused(net, url)
    assert net.connected == []
    assert net.lookups == 0


def test_allowed_domains() -> None:
    for domain, url in (
        ("*.example.com", URL),
        (f"{HOST}:8080", f"http://{HOST}:8080/"),
        (HOST.upper(), URL),
        (HOST, f"http://{HOST}:443/"),
    ):
        assert fetched(Net(lambda head: ok(b"image")), url, [domain]) == b"image"
    for domain, url in (
        ("*.example.com", "http://example.com/"),
        (f"{HOST}:8080", URL),
        ("example.com", URL),
        ("*.example.com", "http://anexample.com/"),
    ):
        everywhere = {host: [[PUBLIC]] for host in ("example.com", "anexample.com")}
        net = Net(lambda head: ok(b"image"), **everywhere)
        assert refused(net, url, [domain])
        assert net.lookups == 0


PRIVATE = [
    *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
    *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::", "::127.0.0.1"),
    "nothing",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public_are_not_connected_to(address: str) -> None:
    assert not is_public(address)
    for found in ([address], [PUBLIC, address], [address, OTHER], []):
        net = Net(lambda head: ok(b"image"), **{HOST: [found]})
        assert "public" in (said := refused(net))
        assert net.connected == []
        assert address not in said


@pytest.mark.parametrize("address", [PUBLIC, OTHER, "8.8.8.8", "::ffff:8.8.8.8"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


def test_a_host_whose_address_changes_after_the_check() -> None:
    """DNS rebinding: the second answer would be loopback, and is not asked for."""
    net = Net(lambda head: ok(b"image"), **{HOST: [[PUBLIC], ["127.0.0.1"]]})
    assert fetched(net) == b"image"
    assert net.connected == [(PUBLIC, 80, None)]


@pytest.mark.parametrize(
    "to",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://localhost/",
        "http://internal.example.com/",
        f"http://{HOST}:22/",
        "file:///etc/passwd",
        "http://evil.org/",
        "//evil.org/",
    ],
)
def test_a_redirect_is_checked_like_the_first_url(to: str) -> None:
    net = Net(lambda head: redirect(to), **{"internal.example.com": [["10.0.0.1"]]})
    assert refused(net, domains=["*.example.com"])
    assert net.connected == [(PUBLIC, 80, None)]


def test_a_redirect_to_the_same_name_with_another_address() -> None:
    net = Net(lambda head: redirect("/again"), **{HOST: [[PUBLIC], ["127.0.0.1"]]})
    assert "public" in refused(net)
    assert len(net.connected) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed(status: int) -> None:
    net = Net(lambda head: ok(b"image") if b"GET /b " in head else redirect("b", status))
    assert fetched(net) == b"image"
    assert len(net.connected) == 2


def test_redirects_end() -> None:
    net = Net(lambda head: redirect("/again"))
    assert "more than 3 times" in refused(net)
    assert len(net.connected) == 4
    assert refused(Net(lambda head: b"HTTP/1.1 302 Found\r\n\r\n"))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ok(bytes(1001)), "more than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", "more than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(5000), "more than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nimage", "truncated"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nimage", "truncated"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * (1 << 20), "headers"),
        (b"HTTP/1.1 200 OK\r\n", "truncated"),
        (b"", "truncated"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", "cannot be read"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "404"),
        (ok(b"image", "Content-Encoding: gzip"), "compressed"),
    ],
)
def test_answers_that_are_refused(answer: bytes, message: str) -> None:
    assert message in refused(Net(lambda head: answer))


def test_a_server_that_never_answers() -> None:
    assert "within 0.2 s" in refused(Net(lambda head: None), limits=FetchLimits(seconds=0.2))


def test_a_server_that_answers_byte_by_byte() -> None:
    """The time limit is that of the whole answer, not of each read."""

    class Slow(Net):
        async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                while not writer.is_closing():
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.01)

    assert "within 0.5 s" in refused(Slow(lambda head: None), limits=FetchLimits(bytes=1 << 30, seconds=0.5))


def test_a_tenant_with_slow_urls_leaves_turns_for_others() -> None:
    net = Net(lambda head: None if b"/slow" in head else ok(b"image"))

    async def test() -> None:
        async with net.fetcher(limits=FetchLimits(seconds=20.0, at_once=3, share=2)) as fetcher:
            slow = [asyncio.ensure_future(fetcher.fetch(f"http://{HOST}/slow", "a")) for _ in range(8)]
            while len(net.asked) < 2:
                await asyncio.sleep(0)
            assert await fetcher.fetch(URL, "b") == b"image"
            assert len(net.asked) == 3
            for task in slow:
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)

    asyncio.run(test())


def test_faults_of_connections_are_refusals() -> None:
    for fault in (ConnectionRefusedError(), ssl.SSLCertVerificationError("no")):
        net = Net(lambda head: ok(b"image"))

        async def fails(address: str, port: int, name: str | None, fault: OSError = fault) -> None:
            raise fault

        net.connect = fails  # type: ignore[assignment, method-assign]
        assert type(fault).__name__ in refused(net)
    assert "resolved" in refused(Net(lambda head: ok(b"")), "http://unknown.example.com/", ["*.example.com"])
