"""Tests of SMG with KV events from each replica: it routes by cached prefixes, including those of other clients."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator

import httpx
import pytest

from tests.fleet.smg import Router, free_ports, routing
from tests.serve.fake_engine import write_fake_folder
from tests.serve.processes import BOUND, ServerProcess, wait_until

PAGE = 16  # tokens, which are bytes
EVENTS = ["--policy", "cache_aware", "--worker-warmup-secs", "0"]


class Replica:
    """A server over the fake engine, on a port that it keeps when it is restarted."""

    def __init__(self, folder: pathlib.Path) -> None:
        folder.mkdir(parents=True)
        self._folder, self.starts = folder, 0
        (self._port,) = free_ports(1)
        self._model = str(write_fake_folder(folder / "model"))
        self.start()

    def start(self) -> None:
        self.starts += 1
        given = {"model": "fake", "grpc_port": self._port, "http_port": 0, "vllm_grpc": True}
        events = {"kv_events": True, "kv_events_endpoint": "off"}
        arguments = ["-m", "tests.serve.processes", json.dumps(given | events), "--folder", self._model]
        self.server = ServerProcess(arguments, self._folder / f"{self.starts}.log")
        self.server.until_logged("ready: ")

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self._port}"

    def warm(self, prompt: str) -> None:
        """Serve a prompt that the router has not seen."""
        url = f"http://127.0.0.1:{self.server.http_port}/v1/completions"
        answer = httpx.post(url, json={"prompt": prompt, "max_tokens": 1}, timeout=BOUND)
        assert answer.is_success, answer.text

    def looked_up(self) -> tuple[float, float]:
        """Return the prompt tokens looked up in the prefix cache, and the hits."""
        lines = httpx.get(f"http://127.0.0.1:{self.server.http_port}/metrics", timeout=BOUND).text.splitlines()
        found = dict(line.rpartition(" ")[::2] for line in lines if not line.startswith("#"))
        names = ("jaxinfer:prefix_cache_queries_total", "jaxinfer:prefix_cache_hits_total")
        queries, hits = (sum(float(value) for key, value in found.items() if key.startswith(name)) for name in names)
        return queries, hits


class Fleet:
    """Two replicas, and a router that receives their KV events."""

    def __init__(self, router: Router, replicas: list[Replica], metrics: int) -> None:
        self.router, self.replicas, self._metrics = router, replicas, metrics

    def applied(self, rank: int) -> float:
        """Return the number of events of a replica that the router has applied."""
        text = httpx.get(f"http://127.0.0.1:{self._metrics}/metrics", timeout=BOUND).text
        name = f'smg_kv_event_apply_seconds_count{{worker="grpc://{self.replicas[rank].target}"}}'
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    def warm(self, rank: int, prompt: str) -> None:
        """Serve a prompt directly on a replica, and wait until the router has its events."""
        before = self.applied(rank)
        self.replicas[rank].warm(prompt)
        wait_until(lambda: self.applied(rank) > before)

    def served_by(self, prompt: str) -> tuple[int, float]:
        """Return the replica that served a prompt, and the number of cached tokens."""
        before = [replica.looked_up() for replica in self.replicas]
        body = {"model": "fake", "prompt": prompt, "max_tokens": 1}
        answer = httpx.post(f"{self.router.url}/v1/completions", json=body, timeout=BOUND)
        assert answer.is_success, answer.text
        after = [replica.looked_up() for replica in self.replicas]
        (rank,) = [rank for rank, (queries, _) in enumerate(after) if queries > before[rank][0]]
        return rank, after[rank][1] - before[rank][1]


@pytest.fixture(scope="module")
def fleet(programs: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder, (metrics,) = tmp_path_factory.mktemp("fleet"), free_ports(1)
    with contextlib.ExitStack() as stack:
        replicas = []
        for rank in range(2):
            replicas.append(Replica(folder / str(rank)))
            stack.callback(lambda replica=replicas[-1]: replica.server.end())
        options = [*EVENTS, "--prometheus-port", str(metrics)]
        targets = [replica.target for replica in replicas]
        router = stack.enter_context(routing(programs / "smg", targets, folder / "smg.log", *options))
        wait_until(lambda: router.log().count("KV event stream connected") >= 2)
        yield Fleet(router, replicas, metrics)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_prompt_goes_where_its_beginning_is_although_the_router_did_not_send_it_there(
    fleet: Fleet, rank: int
) -> None:
    for letter in "abc":
        prefix = f"{rank}{letter}" * (4 * PAGE)
        fleet.warm(rank, prefix + "!")
        assert [fleet.served_by(f"{prefix}{turn} and more") for turn in range(3)] == [(rank, 8 * PAGE)] * 3


def test_what_is_forgotten_draws_nobody(fleet: Fleet) -> None:
    prefix = "yz" * (4 * PAGE)
    fleet.warm(1, prefix + "!")
    before = fleet.applied(1)
    url = f"http://127.0.0.1:{fleet.replicas[1].server.http_port}/reset_prefix_cache"
    assert httpx.post(url, timeout=BOUND).json()["pages"] > 0
    wait_until(lambda: fleet.applied(1) > before)
    fleet.warm(0, prefix + "!")
    assert fleet.served_by(prefix + "?") == (0, 8 * PAGE)


def test_a_replica_that_is_killed_and_started_again_is_recognised(fleet: Fleet) -> None:
    """The router reconnects with the old process's sequence number, and gets a snapshot of the new process."""
    prefix, router = "kl" * (4 * PAGE), fleet.router
    fleet.warm(1, prefix + "!")
    connected, snapshots = (router.log().count(text) for text in ("KV event stream connected", "snapshot applied"))
    fleet.replicas[1].server.end()
    fleet.replicas[1].start()
    wait_until(lambda: router.log().count("KV event stream connected") > connected)
    wait_until(lambda: router.log().count("snapshot applied") > snapshots)
    wait_until(lambda: sum(router.workers().values()) == 2)
    fleet.warm(0, prefix + "!")
    assert fleet.served_by(prefix + "?") == (0, 8 * PAGE)
    fleet.warm(1, "mn" * (4 * PAGE) + "!")
    assert fleet.served_by("mn" * (4 * PAGE) + "?") == (1, 8 * PAGE)
