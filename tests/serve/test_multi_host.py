"""Tests of one engine over two processes, as on two hosts: tokens equal those of one process, and the group recovers
after a process is killed, stopped or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import jax
import numpy as np
import pytest

from jaxinfer import client as c
from jaxinfer.cli.serve import parse
from jaxinfer.loading import load_model
from jaxinfer.protos.v1 import control_pb2 as control
from jaxinfer.protos.v1.control_pb2_grpc import ControlStub
from jaxinfer.serve.__main__ import serve
from jaxinfer.serve.core.worker_node import Follower
from jaxinfer.serve.runtime import logs
from jaxinfer.serve.settings import make_config
from tests.serve.processes import BOUND, ServerProcess, is_alive, started, wait_until

DETECTED = 15.0  # documented bound in seconds
SMALL = ["--max-num-seqs", "4", "--max-model-len", "256", "--prefill-sizes", "64", "--max-prefill-rows", "1"]
PROMPTS = ("ROMEO:", "JULIET: my lord", "First Citizen: " * 12, "The")
LENGTH = 24


@dataclasses.dataclass
class Pair:
    """Both processes of a group."""

    first: ServerProcess
    second: ServerProcess

    def until_ready(self) -> None:
        self.first.until_logged("ready: ")

    def core(self, number: int) -> int:
        found = (self.first, self.second)[number].core
        assert found is not None
        return found


def arguments(model: str, devices: int, cache: pathlib.Path, *more: str, stages: int = 1) -> list[str]:
    shape = ["--tensor-parallel-size", str(devices // stages), "--pipeline-parallel-size", str(stages)]
    ports = ["--grpc-port", "0", "--http-port", "off", "--control-port", "0", "--compilation-cache-dir", str(cache)]
    return ["-m", "jaxinfer.serve", "--model", model, *ports, *shape, *SMALL, *more]


def group_flags(folder: pathlib.Path, number: int) -> list[str]:
    key, address = folder / "key", folder / "address"
    if not key.exists():
        key.write_text(os.urandom(32).hex())
        with socket.create_server(("127.0.0.1", 0)) as found:
            address.write_text(f"127.0.0.1:{found.getsockname()[1]}")
    who = ["--num-processes", "2", "--process-id", str(number), "--group-key-file", str(key)]
    return [*who, "--coordinator-address", address.read_text()]


@contextlib.contextmanager
def pair_of(
    model: str,
    devices: int,
    folder: pathlib.Path,
    cache: pathlib.Path,
    stuck: pathlib.Path | None = None,
    stages: int = 1,
    roots: Sequence[pathlib.Path] = (),
) -> Iterator[Pair]:
    """Yield a group with half of the devices per process; ``stuck``: file for `stuck_core` in the second process;
    ``roots``: folder of weights of each process."""
    with contextlib.ExitStack() as stack:
        found = []
        for number in (0, 1):
            place = folder / str(number)
            place.mkdir()
            root = ["--weights-root", str(roots[number])] if roots else []
            given = arguments(model, devices, cache, *group_flags(folder, number), *root, stages=stages)
            if number and stuck is not None:
                given = ["-m", "tests.serve.test_multi_host", str(stuck), json.dumps(stuck_settings(given))]
            with forced(devices // 2):
                found.append(stack.enter_context(started(given, place)))
        yield Pair(*found)


def stuck_settings(given: list[str]) -> dict[str, object]:
    """Return the settings of the flags."""
    return dataclasses.asdict(parse(given[2:]).configuration)


@contextlib.contextmanager
def forced(devices: int) -> Iterator[None]:
    """Force this number of CPU devices in processes started in the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={devices}")
        yield


# ---- clients


async def ask(client: c.AsyncClient, number: int, length: int = LENGTH) -> tuple[list[int], str]:
    """Return the tokens and the status of one of the requests."""
    tokens: list[int] = []
    options = {"temperature": 0.0} if number % 2 == 0 else {"temperature": 0.9, "seed": number, "presence_penalty": 0.3}
    prompt = PROMPTS[number % len(PROMPTS)]
    try:
        async with client.stream(prompt, max_tokens=length, ignore_eos=True, timeout=BOUND, **options) as stream:
            async for delta in stream:
                tokens += delta.token_ids
    except c.ServerError as error:
        return tokens, error.code.name
    return tokens, "OK"


async def ask_all(server: ServerProcess, count: int = 8) -> list[tuple[list[int], str]]:
    async with c.AsyncClient(f"127.0.0.1:{server.grpc_port}", retry=None) as client:
        return list(await asyncio.gather(*(ask(client, number) for number in range(count))))


async def ask_until_failed(server: ServerProcess) -> tuple[str, float]:
    """Send requests until one fails; return its status and time."""
    async with c.AsyncClient(f"127.0.0.1:{server.grpc_port}", retry=None) as client:
        while True:
            _, status = await ask(client, 0, 200)
            if status != "OK":
                return status, time.monotonic()


async def until_serving(server: ServerProcess) -> None:
    async with c.AsyncClient(f"127.0.0.1:{server.grpc_port}", retry=None) as client:
        await client.wait_ready(timeout=BOUND)


def check_fault(pair: Pair, want: list[tuple[list[int], str]], harm: Callable[[], None]) -> None:
    """Inject a fault while requests run: they fail in time, and the group recovers with the same tokens."""

    async def main() -> float:
        asking = asyncio.create_task(ask_until_failed(pair.first))
        await asyncio.sleep(0.5)
        assert not asking.done()
        start = time.monotonic()
        await asyncio.to_thread(harm)
        status, end = await asyncio.wait_for(asking, BOUND)
        assert status == "UNAVAILABLE"
        return end - start

    took = asyncio.run(main())
    assert took < DETECTED
    asyncio.run(until_serving(pair.first))
    assert asyncio.run(ask_all(pair.first)) == want


def compiled_since_ready(server: ServerProcess) -> int:
    """Return the number of compilations of process 0."""
    with grpc.insecure_channel(f"127.0.0.1:{server.control_port}") as channel:
        return ControlStub(channel).GetStats(control.GetStatsRequest()).compilations


def check_devices(pair: Pair) -> None:
    """Check that process 0 reports the memory of all devices, of which each has its share."""

    def devices() -> list[dict[str, Any]]:
        with c.Control(f"127.0.0.1:{pair.first.control_port}", timeout=BOUND) as operator:
            found: list[dict[str, Any]] = operator.stats()["devices"]
        return found

    wait_until(lambda: len(devices()) == 4)
    found = devices()
    assert [each["process"] for each in found] == [0, 0, 1, 1]
    assert len({each["device"] for each in found}) == 4
    for name in ("weights", "kv_cache", "busy_seconds"):
        assert len({each.get(name, each["parts"].get(name)) for each in found}) == 1, name


# ---- the fast tier: two processes of two devices


@pytest.mark.slow
def test_two_processes_serve_and_come_back(tmp_path):
    """Two processes return the tokens of one process that has all devices, also after the second one is killed."""
    cache, folder = tmp_path / "cache", tmp_path / "alone"
    folder.mkdir()
    with pair_of("demo-draft", 4, tmp_path, cache) as pair:
        with forced(4), started(arguments("demo-draft", 4, folder), folder) as alone:
            alone.until_logged("ready: ")
            want = asyncio.run(ask_all(alone))
        pair.until_ready()
        assert asyncio.run(ask_all(pair.first)) == want
        assert {status for _, status in want} == {"OK"}
        assert compiled_since_ready(pair.first) == 0
        check_devices(pair)
        check_fault(pair, want, lambda: os.kill(pair.core(1), signal.SIGKILL))
        check_ends(pair)


@pytest.mark.slow
def test_weights_of_a_group_change_sleep_and_outlive_it(tmp_path):
    """Both processes serve new weights, or neither; the next group serves the last ones."""
    cache, roots, random = tmp_path / "cache", [tmp_path / "root0", tmp_path / "root1"], np.random.default_rng(0)
    model = load_model("demo-draft", show_progress=False)
    new = jax.tree.map(lambda x: (np.asarray(x) * (1 + 0.2 * random.standard_normal(x.shape))).astype(x.dtype), model)
    for folder in (roots[0] / "b", roots[1] / "b", roots[0] / "lone"):
        new.save(folder)
    (folder := tmp_path / "alone").mkdir()
    with pair_of("demo-draft", 2, tmp_path, cache, roots=roots) as pair:
        pair.until_ready()
        before = asyncio.run(ask_all(pair.first))
        with c.Control(f"127.0.0.1:{pair.first.control_port}", timeout=BOUND) as operator:
            with pytest.raises(c.InvalidRequest) as refused:
                operator.update_weights("lone")
            assert "process 1" in str(refused.value)
            assert asyncio.run(ask_all(pair.first)) == before
            assert operator.update_weights("b", mode="keep").weight_version == 1
            after = asyncio.run(ask_all(pair.first))
            sums = operator.weight_info(checksums=True).checksums
            for level in (1, 2):
                operator.sleep(level)
                operator.wake_up()
                if level == 2:
                    assert operator.update_weights("b").weight_version == 2
                assert asyncio.run(ask_all(pair.first)) == after
            asyncio.run(update_amid(operator, pair.first))
            assert compiled_since_ready(pair.first) == 0
            os.kill(pair.core(1), signal.SIGKILL)
            wait_until(lambda: operator.stats()["restarts"] == 1)
            asyncio.run(until_serving(pair.first))
            assert asyncio.run(ask_all(pair.first)) == after
            found = operator.weight_info(checksums=True)
            assert (found.weight_version, found.checksums) == (3, sums)
        with forced(2), started(arguments(str(roots[0] / "b"), 2, folder), folder) as alone:
            alone.until_logged("ready: ")
            assert asyncio.run(ask_all(alone)) == after


async def update_amid(operator: c.Control, server: ServerProcess) -> None:
    """Update while requests run, to the weights that are served: they go on, and keep their tokens."""
    asking = asyncio.create_task(ask_all(server))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(operator.update_weights, "b", mode="keep")
    assert {status for _, status in await asking} == {"OK"}


def check_ends(pair: Pair) -> None:
    """SIGTERM stops the first process in order; the second waits for a new one until it is stopped, too."""
    looked = pair.second.log().count("looking for process 0")
    pair.first.signal(signal.SIGTERM)
    assert pair.first.wait() == 0
    wait_until(lambda: pair.second.log().count("looking for process 0") > looked)
    core = pair.core(1)
    pair.second.signal(signal.SIGTERM)
    assert pair.second.wait() == 0
    assert not is_alive(core)


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_cannot_be_in_a_group_is_one_sentence(tmp_path, number):
    who = ["--num-processes", "2", "--process-id", str(number), "--coordinator-address", "127.0.0.1:1"]
    with started(arguments("demo", 2, tmp_path, *who, "--group-key-file", "/nowhere"), tmp_path) as server:
        assert server.wait() == 2
    assert server.log().splitlines()[-1].startswith("error: group_key_file = '/nowhere' cannot be read")
    assert "Traceback" not in server.log()


# ---- the slow tier: two processes of four devices, the demo model; each has all layers, or half of them


@pytest.fixture(scope="module", params=[1, 2], ids=["no stages", "two stages"])
def stages(request):
    return request.param


@pytest.fixture(scope="module")
def alone(stages, tmp_path_factory):
    """Return the answers of one process with eight devices, and its compilation cache."""
    folder = tmp_path_factory.mktemp("alone")
    with forced(8), started(arguments("demo", 8, folder / "cache", stages=stages), folder) as server:
        server.until_logged("ready: ")
        return asyncio.run(ask_all(server)), folder / "cache"


@pytest.fixture(scope="module")
def pair(stages, alone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    with pair_of("demo", 8, folder, alone[1], folder / "stuck", stages) as found:
        found.until_ready()
        yield found, folder / "stuck"


@pytest.mark.slow
def test_two_processes_give_the_tokens_of_one(alone, pair):
    assert asyncio.run(ask_all(pair[0].first)) == alone[0]
    assert compiled_since_ready(pair[0].first) == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("number_of_signal", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_is_stopped(alone, pair, number, number_of_signal):
    check_fault(pair[0], alone[0], lambda: os.kill(pair[0].core(number), number_of_signal))


@pytest.mark.slow
def test_a_process_that_is_stuck(alone, pair):
    """A stuck process that sends heartbeats is detected; the other process would wait forever in a collective."""
    group, stuck = pair
    once = threading.Timer(DETECTED, stuck.unlink)  # so that the next process is not stuck

    def harm() -> None:
        stuck.touch()
        once.start()

    check_fault(group, alone[0], harm)
    once.join()
    assert "process 1 hangs: no call was finished in 10 s, the last was Decode" in group.first.log()


def main() -> int:
    """Run a follower over `tests.serve.stuck_core`."""
    config = make_config(json.loads(sys.argv[2]))
    logs.configure("text", "info")
    return asyncio.run(serve(Follower(config, [sys.executable, "-m", "tests.serve.stuck_core", sys.argv[1]])))


if __name__ == "__main__":
    sys.exit(main())
