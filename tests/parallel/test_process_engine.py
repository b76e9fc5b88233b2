"""Stages and replicas whose devices span several processes are bitwise identical to one process."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

import pytest

BOUND = 500.0


def given(repo: pathlib.Path, processes: int, devices: int, sizes: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the result of an engine with ``processes`` processes of ``devices`` devices each."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    work = {"processes": processes, "port": port, "model": "demo-draft", "requests": 24, "greedy": False, **more}
    env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    with contextlib.ExitStack() as stack:
        running = []
        for number in range(processes):
            command = json.dumps({**work, "number": number, "settings": sizes})
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.parallel.process_engine", command],
                cwd=repo,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            running.append(stack.enter_context(process))
            stack.callback(process.kill)
        out, error = running[0].communicate(timeout=BOUND)
        assert running[0].returncode == 0, error[-4000:]
        others = [process.communicate(timeout=BOUND)[0] for process in running[1:]]
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result | {"compiled elsewhere": [int(each.splitlines()[-1]) for each in others]}


SHAPES = {
    "a stage in each of two": (2, 4, {"tensor": 4, "pipeline": 2}),
    "two stages in each of two": (2, 2, {"pipeline": 4}),
    "a stage over two of four": (4, 1, {"tensor": 2, "pipeline": 2}),
    "a replica in each of two": (2, 2, {"tensor": 2, "data": 2}),
    "a replica of two stages in each": (2, 2, {"pipeline": 2, "data": 2}),
    "a replica of two stages over two of four": (4, 1, {"pipeline": 2, "data": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_the_bits_of_several_processes_are_those_of_one(repo, name):
    """Prefix cache, chunked prefill, preemption, sampling, logprobs and several samples are all in use."""
    processes, devices, axes = SHAPES[name]
    settings: dict[str, Any] = {f"{axis}_parallel_size": size for axis, size in axes.items()}
    if name == "a stage in each of two":  # here the probe compares programs of both stages
        settings |= {"prefill_sizes": [16, 32], "max_prefill_rows": 2}
    model = "demo" if axes.get("pipeline") == 4 else "demo-draft"  # of six layers, of two
    want = given(repo, 1, processes * devices, settings, model=model)
    got = given(repo, processes, devices, settings, model=model)
    assert got["found"] == want["found"]
    assert got["compiled"] == 0
    assert got["preempted"]
    assert got["hits"]


@pytest.mark.slow
@pytest.mark.parametrize("modes", [{"swap_space_gib": 0}, {"speculative": "ngram"}, {"async_scheduling": False}])
def test_greedy_tokens_are_those_of_one_device(repo, modes):
    want = given(repo, 1, 1, modes, greedy=True, requests=60)
    sizes = {"pipeline_parallel_size": 2, "data_parallel_size": 2}
    assert given(repo, 4, 1, {**sizes, **modes}, greedy=True, requests=60)["found"] == want["found"]


@pytest.mark.slow
def test_several_steps_at_once_by_a_replica_elsewhere(repo):
    sizes = {"data_parallel_size": 2, "multi_step": 4}
    assert given(repo, 2, 1, sizes)["found"] == given(repo, 1, 2, sizes)["found"]


@pytest.mark.slow
def test_adapters_that_are_loaded_amid_requests_are_in_every_process(repo):
    """A weight's devices are in two processes: each receives the load command and has its own shard of the adapter."""
    settings = {"tensor_parallel_size": 2, "enable_lora": True, "max_loras": 2, "max_lora_rank": 4}
    loras = ["pirate", "poet", "clerk"]
    want, got = (given(repo, count, 2 // count, settings, loras=loras) for count in (1, 2))
    assert got["found"] == want["found"]
    assert got["compiled"] == 0


IMAGES = {
    "a stage in each of two": {"pipeline_parallel_size": 2},
    "a stage over two": {"tensor_parallel_size": 2},
    "a replica in each of two": {"data_parallel_size": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGES)
def test_images_of_several_processes_have_the_bits_of_one(repo, name):
    """The tower is in the processes of the first stage, whose encoder caches evict and keep the same images."""
    work = {"model": "demo-vision", "images": True}
    settings = {**IMAGES[name], "encoder_cache_size": 144}
    want, got = (given(repo, count, 2 // count, settings, **work) for count in (1, 2))
    assert got["found"] == want["found"]
    assert got["encoded"] == want["encoded"]
    assert min(got["encoded"]) > 0
    assert got["compiled"] == 0
    assert got["preempted"]
