"""Tests of two replicas behind Envoy, configured by configs/envoy/envoy.yaml."""

from __future__ import annotations

import json
import subprocess

import httpx

from tests.fleet.balancers import ENVOY, Balancer, Envoy, envoy_program
from tests.fleet.gates import Doors, Gates
from tests.fleet.tls import Encrypted
from tests.fleet.upstreams import Upstream, late, say


class TestGates(Gates):
    balancer = Envoy


class TestEncrypted(Encrypted):
    balancer = Envoy


class TestDoors(Doors):
    balancer = Envoy

    def test_clients_set_no_time_outs_of_envoys(self, door: httpx.Client, upstreams: list[Upstream]) -> None:
        for upstream in upstreams:
            upstream.answer = late(0.2)
        headers = {"x-envoy-upstream-rq-timeout-ms": "1", "x-envoy-max-retries": "9"}
        assert door.post("/v1/completions", json={}, headers=headers).status_code == 200

    def test_a_replica_whose_clients_give_no_time_stays(
        self, door: httpx.Client, running: Balancer, upstreams: list[Upstream]
    ) -> None:
        upstreams[0].answer = say(504)
        for _ in range(40):
            door.post("/v1/completions", json={})
        assert len(upstreams[0].asked) > 5
        assert not ejected(running)

    def test_a_replica_that_answers_500_is_ejected(
        self, door: httpx.Client, running: Balancer, upstreams: list[Upstream]
    ) -> None:
        upstreams[0].answer = say(500)
        statuses = [door.post("/v1/completions", json={}).status_code for _ in range(60)]
        assert statuses.count(500) == 5
        assert set(statuses[-30:]) == {200}
        assert ejected(running)


def ejected(envoy: Balancer) -> list[str]:
    """Return the hosts that outlier detection has ejected."""
    known = json.loads(envoy.figures("/clusters?format=json"))["cluster_statuses"]
    hosts = [host for cluster in known for host in cluster["host_statuses"]]
    return [str(host["address"]) for host in hosts if host["health_status"].get("failed_outlier_check")]


def test_it_takes_its_configuration_without_a_warning() -> None:
    command = [envoy_program(), "--mode", "validate", "-c", str(ENVOY)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert checked.returncode == 0, checked.stderr
    assert not [line for line in checked.stderr.splitlines() if "[warning]" in line or "[error]" in line]
