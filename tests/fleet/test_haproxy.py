"""Tests of two replicas behind haproxy, configured by configs/haproxy/haproxy.cfg."""

from __future__ import annotations

import subprocess

from tests.fleet.balancers import HAPROXY, HAProxy, haproxy_program
from tests.fleet.gates import Doors, Gates
from tests.fleet.tls import Encrypted


class TestGates(Gates):
    balancer = HAProxy


class TestEncrypted(Encrypted):
    balancer = HAProxy


class TestDoors(Doors):
    balancer = HAProxy


def test_it_takes_its_configuration_without_a_warning() -> None:
    command = [haproxy_program(), "-c", "-f", str(HAPROXY)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "WARNING" not in checked.stderr + checked.stdout
