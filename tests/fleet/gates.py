"""Tests for all balancers: `Gates` over two replicas, `Doors` over scripted upstreams.

A test file derives from each class and selects the balancer.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import httpx
import pytest

from tests.fleet.balancers import Balancer
from tests.fleet.fake_core import SLOW
from tests.fleet.load import WHOLE, Ask, Asker, kinds
from tests.fleet.replicas import Replica
from tests.fleet.rolling import Fleet, fleet, roll
from tests.fleet.upstreams import Upstream, cut, hang_up, late, say
from tests.serve.processes import wait_until

LIMIT = 16 << 20
"""Maximum bytes of a body, as in the server."""
RUNNING = 400
"""Tokens of an answer that is in progress during a fault: four seconds, more on a busy machine."""
OUT_SECONDS = 60.0
"""Seconds until a hung replica is taken out; an idle machine takes seven."""


class Gates:
    """Tests of a balancer in front of two replicas.

    Attributes:
        balancer: class of the balancer.
    """

    balancer: type[Balancer]

    @pytest.fixture(scope="class")
    @classmethod
    def fleet(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
        with fleet(cls.balancer, tmp_path_factory.mktemp("fleet")) as made:
            yield made

    @pytest.fixture(autouse=True)
    def _whole(self, fleet: Fleet) -> None:
        fleet.until_up()

    def test_cancelled_requests_stop_within_two_steps(self, fleet: Fleet) -> None:
        assert most_steps_after_leaving(fleet, each=2) <= 2

    @pytest.mark.slow
    def test_many_cancelled_requests_stop_within_two_steps(self, fleet: Fleet) -> None:
        assert most_steps_after_leaving(fleet, each=16) <= 2

    def test_a_hung_replica_gets_nothing_until_it_goes_on(self, fleet: Fleet) -> None:
        hung, other = fleet.replicas
        with running(fleet, tokens=RUNNING) as begun:
            hung.suspend()
            try:
                assert fleet.until_out(hung) < OUT_SECONDS
                answered_by(fleet, other)
            finally:
                hung.resume()
        assert {ask.ended for ask in begun} == {WHOLE}

    def test_what_runs_at_a_killed_replica_ends_with_an_error_and_is_not_made_again(self, fleet: Fleet) -> None:
        killed, other = fleet.replicas
        with running(fleet, tokens=RUNNING) as begun:
            lost = [ask for ask in begun if ask.request_id in killed.requests()]
            killed.kill()
            answered_by(fleet, other)
        kept = [ask for ask in begun if ask not in lost]
        assert lost
        assert {ask.ended for ask in kept} == {WHOLE}
        for ask in lost:
            assert ask.ended not in ("", WHOLE), ask
            assert ask.expected.startswith(ask.text)
            assert ask.text != ask.expected
        assert not {ask.request_id for ask in lost} & other.requests()

    @pytest.mark.slow
    def test_a_balancer_that_leaves_ends_what_it_has(self, fleet: Fleet, tmp_path: pathlib.Path) -> None:
        balancer = self.balancer(tmp_path, [replica.ports for replica in fleet.replicas])
        try:
            with asked(kinds(balancer.http, balancer.grpc), fleet.replicas, tokens=RUNNING) as begun:
                balancer.leave()
                wait_until(lambda: refuses(balancer.http))
            assert {ask.ended for ask in begun} == {WHOLE}
        finally:
            balancer.close()

    def test_a_rolling_restart_loses_no_request(self, fleet: Fleet) -> None:
        """A replica that was taken out gets no new request, which `Fleet.restart` checks."""
        assert set(roll(fleet, 100, clients=20).ended) == {WHOLE}

    @pytest.mark.slow
    def test_rolling_restarts_lose_no_request(self, fleet: Fleet) -> None:
        for _ in range(4):
            assert set(roll(fleet, 2000, clients=48).ended) == {WHOLE}


@contextlib.contextmanager
def running(fleet: Fleet, tokens: int) -> Iterator[list[Ask]]:
    """Yield running requests of each kind on both replicas; wait for their ends on exit."""
    with asked(kinds(fleet.balancer.http, fleet.balancer.grpc), fleet.replicas, tokens) as begun:
        yield begun


@contextlib.contextmanager
def asked(makers: Sequence[Callable[[], Asker]], replicas: Sequence[Replica], tokens: int) -> Iterator[list[Ask]]:
    """Yield four running requests for each kind of client; wait for their ends on exit."""
    clients = [make() for make in makers for _ in range(4)]
    asks = [Ask(tokens=tokens) for _ in clients]
    for client, ask in zip(clients, asks, strict=True):
        client.send(ask)
    wait_until(lambda: {ask.request_id for ask in asks} <= set.union(*(replica.requests() for replica in replicas)))
    assert all({ask.request_id for ask in asks} & replica.requests() for replica in replicas)
    yield asks
    wait_until(lambda: all(ask.ended for ask in asks))
    for client in clients:
        client.close()


def answered_by(fleet: Fleet, replica: Replica) -> None:
    """Assert that all new requests complete on this replica."""
    asks = [Ask() for _ in range(4)]
    for make in kinds(fleet.balancer.http, fleet.balancer.grpc):
        client = make()
        for ask in (new := [Ask() for _ in range(4)]):
            client.ask(ask)
        asks += new
        client.close()
    done = [ask for ask in asks if ask.ended]
    assert {ask.ended for ask in done} == {WHOLE}
    assert {ask.request_id for ask in done} <= replica.requests()


def most_steps_after_leaving(fleet: Fleet, each: int) -> int:
    """Return the most steps started for a request after its client left: unary, streamed and over gRPC.

    The time is taken at the client, so it includes the latency of the balancer.
    """
    clients = [make() for make in kinds(fleet.balancer.http, fleet.balancer.grpc) for _ in range(each)]
    asks = [Ask(tokens=1000, seed=SLOW) for _ in clients]
    for client, ask in zip(clients, asks, strict=True):
        client.send(ask)
    wait_until(lambda: all(len(launches(fleet, ask)) > 2 for ask in asks))
    left = []
    for client in clients:
        left.append(time.monotonic())
        client.leave()
    wait_until(lambda: {ask.request_id for ask in asks} <= {name for r in fleet.replicas for name in r.ended()})
    last = Ask(tokens=4, seed=SLOW)  # an engine that continued would show the requests in these steps
    clients[0].ask(last)
    assert last.ended == WHOLE
    return max(sum(at > gone for at in launches(fleet, ask)) for ask, gone in zip(asks, left, strict=True))


def launches(fleet: Fleet, ask: Ask) -> list[float]:
    """Return the launch times of the steps with a request."""
    return [step.launched for replica in fleet.replicas for step in replica.steps() if ask.request_id in step.requests]


def refuses(port: int) -> bool:
    """Return whether the port refuses connections."""
    try:
        httpx.get(f"http://127.0.0.1:{port}/health", timeout=60)
    except httpx.TransportError:
        return True
    return False


class Doors:
    """Tests of a balancer in front of two upstreams without an engine.

    Attributes:
        balancer: class of the balancer.
    """

    balancer: type[Balancer]

    @pytest.fixture(scope="class")
    @classmethod
    def upstreams(cls) -> Iterator[list[Upstream]]:
        with Upstream(say(200)) as a, Upstream(say(200)) as b:
            yield [a, b]

    @pytest.fixture(scope="class")
    @classmethod
    def running(cls, upstreams: list[Upstream], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Balancer]:
        folder, ports = tmp_path_factory.mktemp("doors"), [upstream.ports for upstream in upstreams]
        balancer = cls.balancer(folder, ports, doors=["http_api"])
        yield balancer
        balancer.close()

    @pytest.fixture
    def door(self, running: Balancer, upstreams: list[Upstream]) -> Iterator[httpx.Client]:
        """Yield a client after each upstream has answered once, which resets the count of consecutive failures from
        earlier tests; five would take it out."""
        for upstream in upstreams:
            upstream.answer = say(200)
            upstream.asked.clear()
        url = f"http://127.0.0.1:{running.http}"
        wait_until(lambda: httpx.post(f"{url}/v1/completions", json={}) and all(each.asked for each in upstreams))
        for upstream in upstreams:
            upstream.asked.clear()
        with httpx.Client(base_url=url, timeout=120) as client:
            yield client

    def test_ids_pass_as_they_are_and_spoofed_addresses_do_not(
        self, door: httpx.Client, upstreams: list[Upstream]
    ) -> None:
        sent = {
            "x-request-id": "00000000-0000-0000-0000-0000000000aa",
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "authorization": "Bearer sesame",
        }
        removed = ("forwarded", "x-forwarded-host", "x-real-ip", "x-gateway-destination-endpoint")
        spoofed = {"x-forwarded-for": "6.6.6.6", "x-forwarded-proto": "https"} | dict.fromkeys(removed, "6.6.6.6:1")
        door.post("/v1/completions", json={}, headers={**sent, **spoofed}).raise_for_status()
        (asked,) = [asked for upstream in upstreams for asked in upstream.asked]
        assert sent.items() <= asked.headers.items()
        assert "6.6.6.6" not in asked.headers["x-forwarded-for"]
        assert asked.headers["x-forwarded-proto"] == "http"
        assert not asked.headers.keys() & set(removed)

    def test_who_sends_no_id_gets_one(self, door: httpx.Client, upstreams: list[Upstream]) -> None:
        for _ in range(2):
            door.post("/v1/completions", json={}).raise_for_status()
        ids = [asked.headers["x-request-id"] for upstream in upstreams for asked in upstream.asked]
        assert len(set(ids)) == 2

    def test_what_one_replica_refuses_the_other_gets(self, door: httpx.Client, upstreams: list[Upstream]) -> None:
        upstreams[0].answer = say(503)
        body = b"x" * 30_000
        for _ in range(4):
            assert door.post("/v1/completions", content=body).status_code == 200
        assert [asked.body for asked in upstreams[1].asked] == [body] * 4

    def test_two_refusals_are_the_answer(self, door: httpx.Client, upstreams: list[Upstream]) -> None:
        for upstream in upstreams:
            upstream.answer = say(503, b'{"error": {"message": "draining"}}')
        answer = door.post("/v1/completions", json={})
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "draining")
        assert [len(upstream.asked) for upstream in upstreams] == [1, 1]

    @pytest.mark.parametrize("status", [429, 500, 504])
    def test_other_errors_are_the_clients_to_judge(
        self, door: httpx.Client, upstreams: list[Upstream], status: int
    ) -> None:
        for upstream in upstreams:
            upstream.answer = say(status)
        assert door.post("/v1/completions", json={}).status_code == status
        assert sum(len(upstream.asked) for upstream in upstreams) == 1

    def test_a_request_that_was_sent_is_not_sent_again(self, door: httpx.Client, upstreams: list[Upstream]) -> None:
        for upstream in upstreams:
            upstream.answer = hang_up
        answer = door.post("/v1/completions", json={})
        assert answer.status_code in (502, 503)
        assert answer.json()["error"]["type"] == "server_error"
        assert sum(len(upstream.asked) for upstream in upstreams) == 1

    def test_a_stream_that_has_begun_is_cut_and_not_begun_again(
        self, door: httpx.Client, upstreams: list[Upstream]
    ) -> None:
        for upstream in upstreams:
            upstream.answer = cut
        with pytest.raises(httpx.RemoteProtocolError):
            door.post("/v1/completions", json={"stream": True})
        assert sum(len(upstream.asked) for upstream in upstreams) == 1

    def test_bodies_have_the_servers_bound(self, door: httpx.Client, upstreams: list[Upstream]) -> None:
        assert door.post("/v1/completions", content=b"x" * LIMIT).status_code == 200
        answer = door.post("/v1/completions", content=b"x" * (LIMIT + 1))
        assert answer.status_code == 413
        assert answer.json()["error"]["message"]
        assert [len(asked.body) for upstream in upstreams for asked in upstream.asked] == [LIMIT]

    @pytest.mark.slow
    def test_an_answer_may_take_longer_than_balancers_usually_wait(
        self, door: httpx.Client, upstreams: list[Upstream]
    ) -> None:
        """Slow answers pass: the default route timeout of Envoy, 15 s, is off."""
        for upstream in upstreams:
            upstream.answer = late(20.0)
        assert door.post("/v1/completions", json={}).status_code == 200

    @pytest.mark.parametrize("path", ["/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
    def test_what_concerns_one_replica_is_not_served(
        self, door: httpx.Client, upstreams: list[Upstream], path: str
    ) -> None:
        answer = door.post(path, json={})
        assert (answer.status_code, answer.json()["error"]["message"]) == (404, "not served here: ask each replica")
        assert not any(upstream.asked for upstream in upstreams)

    def test_the_log_has_no_prompt_no_query_and_no_key(self, door: httpx.Client, running: Balancer) -> None:
        headers = {"x-request-id": 'say-"hello"', "authorization": "Bearer sesame"}
        door.post("/v1/completions?zanzibar=query", json={"prompt": "of zanzibar"}, headers=headers)
        wait_until(lambda: "hello" in running.log.read_text())
        text = running.log.read_text()
        assert not [word for word in ("zanzibar", "sesame") if word in text]
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        (line,) = [line for line in lines if line["request_id"] == 'say-"hello"']
        assert (line["path"], str(line["status"])) == ("/v1/completions", "200")
