"""A rolling restart behind a balancer: `python -m tests.fleet.rolling envoy --rounds 10 --requests 5000`.

Two replicas over the fake core run behind Envoy or haproxy with the configuration of `configs/`. Clients send unary and
streamed HTTP requests and gRPC requests, without retries, while each replica in turn is stopped by SIGTERM and
restarted. Every request without a complete answer counts as lost.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator

from tests.fleet.balancers import Balancer, Envoy, HAProxy
from tests.fleet.load import WHOLE, Ask, Load, number_of
from tests.fleet.replicas import Replica, start_replicas
from tests.serve.processes import wait_until

DELAY = 4.0
"""Seconds of ``drain_delay``: the shipped health checks detect a drain within two."""
_SETTLED = 1.0  # seconds between a report of the admin port and its effect in all threads
_PATIENT = {"drain_seconds": 120.0, "step_timeout": 120.0}  # for a busy machine, and for suspended replicas
_BALANCERS: dict[str, type[Balancer]] = {"envoy": Envoy, "haproxy": HAProxy}


class Fleet:
    """Two replicas behind a balancer.

    Args:
        folder: folder for models, logs and configurations.
        delay: ``drain_delay`` of the replicas.
        slow: seconds of a slow step (`tests.fleet.fake_core`).
    """

    def __init__(
        self, balancer: type[Balancer], folder: pathlib.Path, delay: float = DELAY, slow: float = 0.25
    ) -> None:
        self.replicas = start_replicas(folder, "--seconds", "0.01", "--slow", str(slow), **_PATIENT, drain_delay=delay)
        try:
            self.balancer = balancer(folder, [replica.ports for replica in self.replicas])
        except BaseException:
            self._end_replicas()
            raise

    def until_up(self) -> None:
        """Restart ended replicas, and wait until both get requests."""
        for replica in self.replicas:
            replica.start()
        wait_until(lambda: self.balancer.up() == {"a", "b"})

    def until_out(self, replica: Replica) -> float:
        """Wait until a replica gets no requests; return the seconds that it took."""
        return wait_until(lambda: replica.name in self.balancer.out())

    def restart(self, replica: Replica) -> None:
        """Stop a replica as an orchestrator does, restart it, and wait until it gets requests.

        Raises:
            AssertionError: it got a request made a second or more after the balancer took it out.
        """
        replica.stop()
        self.until_out(replica)
        time.sleep(_SETTLED)
        out = Ask().number
        assert replica.process.wait() == 0, replica.process.log()
        late = [name for name in replica.requests() if number_of(name) > out]
        assert not late, (out, late)
        self.until_up()

    def end(self) -> None:
        """Stop the balancer and the replicas."""
        self.balancer.close()
        self._end_replicas()

    def _end_replicas(self) -> None:
        for replica in self.replicas:
            replica.kill()


@contextlib.contextmanager
def fleet(balancer: type[Balancer], folder: pathlib.Path, delay: float = DELAY) -> Iterator[Fleet]:
    """Yield two replicas that are ready behind a balancer."""
    made = Fleet(balancer, folder, delay)
    try:
        yield made
    finally:
        made.end()


def roll(fleet: Fleet, requests: int, clients: int = 30) -> Load:
    """Restart both replicas under load.

    Args:
        requests: minimum number of requests.
        clients: number of clients.
    """
    with Load(fleet.balancer.http, fleet.balancer.grpc, clients) as load:
        for replica in fleet.replicas:
            fleet.restart(replica)
        wait_until(lambda: load.total >= requests, seconds=3600)
    return load


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("balancer", choices=_BALANCERS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=2000, help="of each round, at least")
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--drain-delay", type=float, default=DELAY, help="0 shows what is lost without it")
    options, lost = parser.parse_args(), 0
    with (
        tempfile.TemporaryDirectory() as folder,
        fleet(_BALANCERS[options.balancer], pathlib.Path(folder), options.drain_delay) as servers,
    ):
        for number in range(1, options.rounds + 1):
            begun = time.monotonic()
            load = roll(servers, options.requests, options.clients)
            lost += load.lost
            seconds = time.monotonic() - begun
            print(f"round {number}: {load.lost} of {load.total} requests lost in {seconds:.0f} s", flush=True)
            for how, count in load.ended.items():
                if how != WHOLE:
                    print(f"  {count} x {how}", flush=True)
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
