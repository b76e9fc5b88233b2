"""Hostile grammars on a real server: each is rejected or served, and concurrent requests keep their output."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from jaxinfer import client as c
from jaxinfer.config import EngineConfig
from jaxinfer.serve.settings import ServeConfig
from jaxinfer.serve.workers import worker
from jaxinfer.structured import helper
from tests.serve.live import Live, live
from tests.structured.hostile import HOSTILE, distinct
from tests.structured.test_hostile import resident_mib

PATIENCE = 240.0
MANY = 5_000  # sent twice
ATTACKERS = 2
NEIGHBOUR: dict[str, Any] = {
    "prompt": "ROMEO:\n",
    "seed": 1,
    "temperature": 1.0,
    "max_tokens": 48,
    "logprobs": 2,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    engine = EngineConfig(max_num_seqs=4, max_model_len=256, prefill_sizes=(64,))
    with live(ServeConfig(model="demo", grpc_port=0, http_port=0, engine=engine)) as found:
        yield found


Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def ask(server: Live) -> Iterator[Ask]:
    """Return a function that requests a completion; arguments: the constraint and more fields."""
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:

        def asked(constraint: dict[str, Any] | None = None, **fields: Any) -> httpx.Response:
            held = {} if constraint is None else {"structured_outputs": constraint}
            return client.post("/v1/completions", json={**NEIGHBOUR, **held, **fields})

        yield asked


def choice_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice


def check_hostile(answer: httpx.Response) -> bool:
    """Return whether the request was served; otherwise check that the error names its grammar."""
    if answer.status_code == 200:
        return choice_of(answer)["finish_reason"] in ("stop", "length")
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "structured_outputs"
    assert len(error["message"]) < 1000
    return False


def test_each_is_refused_or_served_and_neighbours_get_the_same_bits(ask: Ask) -> None:
    expected = choice_of(ask())
    over, found = threading.Event(), list[dict[str, Any]]()

    def neighbour() -> None:
        while not over.is_set():
            found.append(choice_of(ask()))

    with concurrent.futures.ThreadPoolExecutor(ATTACKERS + 1) as threads:
        beside = threads.submit(neighbour)
        try:
            hostile = [threads.submit(ask, make(), max_tokens=6, logprobs=None) for make in HOSTILE.values()]
            served = [check_hostile(each.result()) for each in hostile]
        finally:
            over.set()
        beside.result()
    assert 0 < sum(served) < len(served)
    assert len(found) > 3
    assert all(each == expected for each in found)


def test_over_grpc_they_are_refused_too(server: Live) -> None:
    with (
        c.Client(server.target) as client,
        pytest.raises(c.InvalidRequest, match=r"structured_outputs\.json") as refused,
    ):
        client.generate("ROMEO:\n", structured_outputs=HOSTILE["5,000 properties"]())
    assert refused.value.field == "structured_outputs"


MODULES = [[module.encode()] for module in (helper.MODULE, worker.__name__)]


def helpers() -> list[int]:
    """Return the PIDs of this server's helper and worker processes, which check grammars and compute masks."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            pid, words = int(folder.name), (folder / "cmdline").read_bytes().split(b"\0")
            if words[2:3] in MODULES and os.getpid() in ancestors(pid):
                found.append(pid)
    return found


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid


@pytest.mark.slow
def test_many_that_nobody_has_asked_for_before_leave_nothing_behind(ask: Ask) -> None:
    numbers, sizes = itertools.count(), list[float]()

    def attack(_: int) -> None:
        assert check_hostile(ask(distinct(next(numbers)), max_tokens=2, logprobs=None))

    with concurrent.futures.ThreadPoolExecutor(2 * ATTACKERS) as threads:
        for _ in range(2):
            list(threads.map(attack, range(MANY)))
            sizes.append(max(resident_mib(pid) for pid in helpers()))
    assert sizes[1] - sizes[0] < 16, sizes
