"""Tests of connection eviction: client names, ranks, and a pass over real sockets."""

import asyncio
import contextlib
import socket
from collections.abc import Mapping

import pytest

from jaxinfer.serve.grpc.connections import Connections, Peer, address_of, plain


@pytest.mark.parametrize(
    ("peer", "name", "address"),
    [
        ("ipv4:127.0.0.1:80", "127.0.0.1 80", "127.0.0.1"),
        ("ipv6:%5B::1%5D:80", "::1 80", "::/64"),
        ("ipv6:[2001:db8:0:1:2::3]:4", "2001:db8:0:1:2::3 4", "2001:db8:0:1::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:80", "fe80::1 80", "fe80::/64"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:80", "10.0.0.1 80", "10.0.0.1"),
        # Connections that were reset before gRPC read their address.
        ("", "", ""),
        ("unknown", "unknown", "unknown"),
        ("ipv4:", "ipv4:", ""),
        ("ipv6:", "ipv6:", "ipv6"),
    ],
)
def test_names_of_peers(peer: str, name: str, address: str) -> None:
    assert (plain(peer), address_of(peer)) == (name, address)


def test_peers_of_a_unix_socket_are_one() -> None:
    assert address_of("unix:") == address_of("unix:/run/x") == "unix"


async def look(connections: Connections, ends: list[socket.socket]) -> list[int]:
    """Return the clients whose connections one pass closes."""
    await connections.look()
    for end in ends:
        end.setblocking(False)
    cut = []
    for at, end in enumerate(ends):
        with contextlib.suppress(BlockingIOError):
            if end.recv(1) == b"":
                cut.append(at)
    return cut


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_strangers_go_first_then_who_was_served_longest_ago_and_never_who_is_served(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"{host} is no address here")
    with listener, contextlib.ExitStack() as stack:
        port = listener.getsockname()[1]
        told: list[None] = []
        connections = Connections({port: 8}, lambda: told.append(None))
        clients, peers = [], []
        for _ in range(8):
            clients.append(stack.enter_context(socket.create_connection((host, port))))
            ours, peer = listener.accept()
            stack.enter_context(ours)
            peers.append(f"ipv6:%5B{peer[0]}%5D:{peer[1]}" if ":" in host else f"ipv4:{peer[0]}:{peer[1]}")

        async def story() -> None:
            for at in (5, 4):  # 4 was served last
                connections.end(peers[at], connections.begin(peers[at], known=True), known=True)
            connections.begin(peers[2], known=False)
            for at in (3, 6, 7):
                connections.begin(peers[at], known=True)
            assert await look(connections, clients) == [0, 1]
            assert len(told) == 2
            for ours in (0, 1):
                clients[ours].close()
            connections.most[port] = 4  # the 3 connections are below the limit
            assert await look(connections, clients[2:]) == [0, 2, 3]
            connections.most[port] = 1
            assert await look(connections, [clients[at] for at in (3, 6, 7)]) == []

        asyncio.run(story())


@pytest.mark.parametrize("peer", ["", "unknown", "ipv4:127.0.0.1:80"])
def test_a_call_of_any_peer_may_end_during_a_look(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connections = Connections({1: 8})
    call, waits = connections.begin(peer, known=False), connections._look

    def during(peers: Mapping[str, Peer]) -> tuple[set[str | None], int]:
        connections.end(peer, call, known=False)
        return waits(peers)

    monkeypatch.setattr(connections, "_look", during)
    assert not asyncio.run(connections.look())
    assert not connections._peers


def test_looks_are_close_where_half_of_the_places_are_taken() -> None:
    async def story(connections: Connections) -> float:
        await connections.look()
        return connections._pause()

    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        port = listener.getsockname()[1]
        for _ in range(3):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            stack.enter_context(listener.accept()[0])
        calm, close = (asyncio.run(story(Connections({port: most}))) for most in (6, 5))
    assert calm == 4 * close


def test_what_is_known_of_peers_that_have_gone_is_forgotten() -> None:
    async def story() -> None:
        connections = Connections({})
        for port in range(1, 100):
            peer = f"ipv4:127.0.0.9:{port}"
            connections.end(peer, connections.begin(peer, known=True), known=True)
        still = connections.begin("ipv4:127.0.0.9:100", known=True)
        assert len(connections._peers) == 100
        await connections.look()
        assert connections._peers == {"ipv4:127.0.0.9:100": still}

    asyncio.run(story())
