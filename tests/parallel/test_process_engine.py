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

import jax
import numpy as np
import pytest

from jaxinfer.loading import load_model

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


PLACES = {
    "a stage in each of two": {"pipeline_parallel_size": 2},
    "a stage over two": {"tensor_parallel_size": 2},
    "a replica in each of two": {"data_parallel_size": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_images_of_several_processes_have_the_bits_of_one(repo, name):
    """The tower is in the processes of the first stage, whose encoder caches evict and keep the same images."""
    work = {"model": "demo-vision", "images": True}
    settings = {**PLACES[name], "encoder_cache_size": 144}
    want, got = (given(repo, count, 2 // count, settings, **work) for count in (1, 2))
    assert got["found"] == want["found"]
    assert got["encoded"] == want["encoded"]
    assert min(got["encoded"]) > 0
    assert got["compiled"] == 0
    assert got["preempted"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a folder with weights ``a`` of the model, and other ones, ``b``."""
    root, random = tmp_path_factory.mktemp("weights"), np.random.default_rng(0)
    model = load_model("demo-draft", show_progress=False)
    model.save(root / "a")

    def changed(array: Any) -> Any:
        return (np.asarray(array) * (1 + 0.2 * random.standard_normal(array.shape))).astype(array.dtype)

    model.replace(params=jax.tree.map(changed, model.params)).save(root / "b")
    return root


AMID = [
    [0, "checksums"],
    [3, "stage", "b"],
    [9, "commit", 5],
    [9, "checksums"],
    [14, "sleep"],
    [14, "wake"],
    [20, "sleep", 2],
    [20, "wake"],
    [20, "stage", "a"],
    [20, "commit"],
    [20, "checksums"],
    [26, "sleep", 1, ["kv_cache"]],
    [26, "wake"],
]
"""Changes while requests run, of which no step may see a part."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_weights_of_several_processes_change_and_sleep_as_those_of_one(repo, weights, name):
    work = {"changes": AMID, "roots": [str(weights)] * 2, "requests": 12}
    want, got = (given(repo, count, 2 // count, PLACES[name], **work) for count in (1, 2))
    assert got["found"] == want["found"]
    assert got["versions"] == [5, 6]
    assert got["compiled"] == sum(got["compiled elsewhere"]) == 0
    start, other, again = got["sums"]
    assert start == again
    assert all(start[path] != other[path] for path in start)
    alike = [path for path in start if start[path] == want["sums"][0][path]]
    assert "final_norm.scale" in alike
    assert (alike == list(start)) == (name != "a stage over two")  # there no process has all of a matrix


@pytest.mark.slow
def test_an_update_before_all_requests_gives_the_tokens_of_an_engine_that_starts_with_it(repo, weights):
    sizes = {"tensor_parallel_size": 2}
    want = given(repo, 1, 2, sizes, model=str(weights / "b"), requests=6)
    changes = [[0, "stage", "b"], [0, "commit"]]
    got = given(repo, 2, 1, sizes, changes=changes, roots=[str(weights)] * 2, requests=6)
    assert got["found"] == want["found"]
    assert got["versions"] == [1]


@pytest.mark.slow
def test_weights_that_one_process_lacks_change_nothing(repo, weights, tmp_path):
    sizes = {"pipeline_parallel_size": 2}
    changes = [[3, "stage", "b"], [6, "commit"], [9, "checksums"]]
    want = given(repo, 2, 1, sizes, requests=6)
    got = given(repo, 2, 1, sizes, changes=changes, roots=[str(weights), str(tmp_path)], requests=6)
    assert got["found"] == want["found"]
    assert got["versions"] == []
    assert len(got["refused"]) == 1
    assert "process 1" in got["refused"][0]


@pytest.mark.slow
def test_quantised_weights_of_several_processes_are_made_again(repo, weights, tmp_path):
    """Each process quantises the new weights, and keeps its own shards; both have compiled what they need."""
    model = tmp_path / "int8"
    command = ["convert", "demo-draft", str(model), "--quantize", "int8", "--output-format", "safetensors"]
    subprocess.run([sys.executable, "-m", "jaxinfer", *command], cwd=repo, check=True, capture_output=True)
    settings = {"tensor_parallel_size": 2, "enable_weight_updates": True}
    work = {"changes": AMID[1:3], "roots": [str(weights)] * 2, "requests": 6, "model": str(model)}
    want, got = (given(repo, count, 2 // count, settings, **work) for count in (1, 2))
    assert got["found"] == want["found"]
    assert got["versions"] == [5]
    assert want["compiled"] == got["compiled"] == sum(got["compiled elsewhere"]) == 0
