"""Arrays of two processes, which are started here; each checks what it sees."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

from jaxinfer.config import EngineConfigError
from jaxinfer.parallel.processes import require_whole


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


def sizes(data: int, stage: int, tensor: int) -> dict[str, int]:
    return {"data": data, "stage": stage, "dp_attn": 1, "expert": 1, "tensor": tensor}


def test_copies_and_stages_are_whole_processes_or_lie_in_one():
    for shape, processes, devices in (((1, 2, 8), 2, 8), ((1, 2, 8), 4, 4), ((2, 4, 1), 2, 4), ((4, 2, 2), 2, 8)):
        require_whole(sizes(*shape), processes, devices)
    words = (
        "pipeline_parallel_size x tensor_parallel_size = 3 x 2 cannot be spread over 2 processes: the 2 devices of a "
    )
    with pytest.raises(EngineConfigError, match=words + "stage and the 3 of a process: neither is a multiple"):
        require_whole(sizes(1, 3, 2), 2, 3)
    with pytest.raises(EngineConfigError, match="the 4 devices of a copy and the 6 of a process"):
        require_whole(sizes(3, 2, 2), 2, 6)
