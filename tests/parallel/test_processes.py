"""Arrays of two processes, which are started here; each checks its own shards."""

import os
import pathlib
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxinfer.config import EngineConfigError
from jaxinfer.parallel import processes
from jaxinfer.parallel.mesh import make_mesh, replicated
from jaxinfer.parallel.processes import on_host, require_host_memory, require_whole


def test_each_process_puts_and_sees_its_own_part(repo: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        address = f"127.0.0.1:{found.getsockname()[1]}"
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-m", "tests.parallel.process_arrays", address]
    running = [
        subprocess.Popen([*command, str(number)], cwd=repo, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for number in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=120)[0].decode() for process in running]
    finally:
        for process in running:
            process.kill()
    assert all("all is well" in text for text in said), "\n".join(said)


def test_arrays_lie_in_the_best_memory_that_a_host_has(monkeypatch) -> None:
    place = replicated(make_mesh())
    assert on_host(place) == place.with_memory_kind("pinned_host")
    for kinds, found in ((("device", "unpinned_host"), "unpinned_host"), (("device",), "device")):
        device = SimpleNamespace(
            addressable_memories=lambda kinds=kinds: [SimpleNamespace(kind=kind) for kind in kinds]
        )
        monkeypatch.setattr(processes, "own_devices", lambda _, device=device: [device])
        assert on_host(place).memory_kind == found


def test_arrays_of_devices_that_are_only_described(monkeypatch) -> None:
    """The devices may all be remote, as those of a later pipeline stage are."""
    place = replicated(make_mesh())
    monkeypatch.setattr(processes, "own_devices", lambda _: [])
    assert on_host(place).memory_kind == "pinned_host"
    assert on_host(place).mesh == make_mesh().abstract_mesh


def test_no_more_is_locked_than_a_runtime_locks(monkeypatch) -> None:
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    require_host_memory(57.5)
    with pytest.raises(EngineConfigError, match="swap_space_gib = 58 is 58 in each process, and of the 64 GiB"):
        require_host_memory(58)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "100")
    require_host_memory(58)
    with pytest.raises(EngineConfigError, match="at most 90% are for pages: set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"):
        require_host_memory(91)


def sizes(data: int, stage: int, tensor: int) -> dict[str, int]:
    return {"data": data, "stage": stage, "dp_attn": 1, "expert": 1, "tensor": tensor}


def test_copies_and_stages_are_whole_processes_or_lie_in_one():
    for shape, count, devices in (((1, 2, 8), 2, 8), ((1, 2, 8), 4, 4), ((2, 4, 1), 2, 4), ((4, 2, 2), 2, 8)):
        require_whole(sizes(*shape), count, devices)
    words = (
        "pipeline_parallel_size x tensor_parallel_size = 3 x 2 cannot be spread over 2 processes: the 2 devices of a "
    )
    with pytest.raises(EngineConfigError, match=words + "stage and the 3 of a process: neither is a multiple"):
        require_whole(sizes(1, 3, 2), 2, 3)
    with pytest.raises(EngineConfigError, match="the 4 devices of a copy and the 6 of a process"):
        require_whole(sizes(3, 2, 2), 2, 6)
