"""Arrays of two processes, which are started here; each checks what it sees."""

import os
import pathlib
import socket
import subprocess
import sys


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
