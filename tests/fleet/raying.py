"""A Ray cluster on loopback, with applications of fake engines."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.serve.context import _get_global_client

from jaxinfer.integrations.ray import build_app
from tests.serve.core.fake_core import REPO, command
from tests.serve.fake_engine import write_fake_folder

BOUND = 420.0  # seconds for operations that take a few on an idle machine, or a minute to compile real programs
_TRIES = 6
SERVICES = ["jaxinfer.protos.v1.inference_pb2_grpc.add_InferenceServicer_to_server"]
ENVIRONMENT = {
    "PYTHONPATH": str(REPO),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.2",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.2",
}


@dataclasses.dataclass
class Cluster:
    """Ray Serve and its two ports."""

    http_port: int
    grpc_port: int
    folder: pathlib.Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def model(self, name: str) -> pathlib.Path:
        """Return the folder of an application's fake model."""
        return self.folder / "models" / name

    def run(
        self, name: str, core: list[str] | None, closed: pathlib.Path | None = None, **settings: Any
    ) -> Application:
        """Deploy replicas, or update the settings of existing ones.

        Args:
            core: options of the fake core; None: the real one.
            closed: file whose existence blocks starting cores.
        """
        folder = write_fake_folder(self.model(name))
        given = {"num_cpus": 0.1, **({} if core is None else {"model": str(folder)}), **settings}
        words = None if core is None else [*_unless(closed), *command("--folder", str(folder), *core)]
        made = build_app(given, words)
        serve.run(made, name=name, route_prefix=f"/{name}")
        return Application(self, name)


@dataclasses.dataclass
class Application:
    """Replicas of an application on the ports of a cluster."""

    cluster: Cluster
    name: str

    @property
    def url(self) -> str:
        return f"{self.cluster.url}/{self.name}"

    @property
    def metadata(self) -> list[tuple[str, str]]:
        return [("application", self.name)]

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=BOUND, **options)

    def post(self, path: str, body: Mapping[str, Any], **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=BOUND, **options)

    def figure(self, name: str) -> float:
        """Return a metric of the only replica."""
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"jaxinfer:{name}{{"))

    def replicas(self) -> list[str]:
        """Return the ids of running replicas."""
        found = _get_global_client().get_serve_details()["applications"][self.name]["deployments"]["jaxinfer"]
        return sorted(each["replica_id"] for each in found["replicas"] if each["state"] == "RUNNING")

    def cores(self) -> list[int]:
        """Return the PIDs of the fake cores."""
        return [pid for pid in _processes() if self._is_core(pid)]

    def delete(self) -> None:
        serve.delete(self.name)

    def _is_core(self, pid: int) -> bool:
        words = _command(pid)
        return "tests.serve.core.fake_core" in words and str(self.cluster.model(self.name)) in words


@contextlib.contextmanager
def cluster(environment: Mapping[str, str] = {}, cpus: int = 8) -> Iterator[Cluster]:
    """Yield Ray Serve with two proxies; stop everything afterwards."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in {**ENVIRONMENT, **environment}.items():
            patch.setenv(name, value)
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True))
        stack.callback(ray.shutdown)
        _init(place, cpus)
        stack.callback(serve.shutdown)
        made = Cluster(*free_ports(2), pathlib.Path(place))
        serve.start(
            http_options={"host": "127.0.0.1", "port": made.http_port},
            grpc_options={"port": made.grpc_port, "grpc_servicer_functions": SERVICES},
        )
        yield made


def _init(place: str, cpus: int) -> None:
    """Start Ray with retries; Ray's limit of half a minute is too short on a busy machine."""
    for left in reversed(range(_TRIES)):
        try:
            ray.init(
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=80 << 20,
                log_to_driver=False,
                _temp_dir=place,  # short, because of socket paths
            )
            return
        except Exception:  # Ray's exception is not public
            ray.shutdown()
            if not left:
                raise


def free_ports(count: int) -> list[int]:
    """Return unused ports; all are open at once, so that no two are equal."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]


def wait_until(condition: Callable[[], object], seconds: float = BOUND) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + seconds, "it did not come true"
        time.sleep(0.05)


def _unless(closed: pathlib.Path | None) -> list[str]:
    return [] if closed is None else ["sh", "-c", f'test -e {closed} && exec sleep 600; exec "$@"', "sh"]


def members() -> list[int]:
    """Return the PIDs of actors that follow process 0 of a group."""
    return [pid for pid in _processes() if _command(pid)[0].startswith("ray::Member")]


def _processes() -> list[int]:
    return [int(path.name) for path in pathlib.Path("/proc").iterdir() if path.name.isdigit()]


def _command(pid: int) -> list[str]:
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:  # it has just ended
        return [""]
