"""Tests that run the pods of the chart on this machine: their commands, settings and files, with local paths instead of
those of a container, and the same permissions. Kubernetes itself does not run."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from jaxinfer.client import Client
from tests.fleet import contained
from tests.fleet.chart import Object, Rendered, Values, container, expanded, merged
from tests.serve.http.test_tls import certify, trusting
from tests.serve.processes import BOUND, ServerProcess, fake_server, wait_until

KEYS = {"alice": "a" * 40, "prometheus": "b" * 40}
SCOPES = {"alice": ["infer"], "prometheus": ["observe"]}


def entries() -> list[Object]:
    return [
        {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "scopes": SCOPES[name]}
        for name, key in KEYS.items()
    ]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]


def small(model: str, **more: Any) -> Values:
    """Return values for a small model on free ports of this machine."""
    ports = dict(zip(("grpc_port", "http_port", "metrics_port", "control_port"), free_ports(4), strict=True))
    engine = {"max_num_seqs": 4, "max_model_len": 256, "prefill_sizes": [64], "max_prefill_rows": 1}
    config = {"model": model, "served_model_name": model, "drain_delay": 10, "drain_seconds": 30, **ports}
    return merged(
        {"models": {"claim": ""}, "apiKeys": {"secret": "", "entries": entries()}},
        {"config": {**config, "engine": engine}},
        more,
    )


class Pod:
    """A container of the chart as a local process: each volume is a folder below ``folder``."""

    def __init__(self, rendered: Rendered, name: str, folder: pathlib.Path, secrets: dict[str, dict[str, str]]) -> None:
        self.pod, self.folder = rendered.pods[name], folder
        self.container = container(self.pod)
        places = {each["mountPath"]: folder / each["name"] for each in self.container["volumeMounts"]}
        self._places, self._path = places, re.compile("|".join(map(re.escape, sorted(places, reverse=True))))
        for place in places.values():
            place.mkdir(parents=True)
        texts = {"config": {"production.yaml": rendered.settings}}
        for volume in self.pod["spec"]["volumes"]:
            texts |= {volume["name"]: secrets[volume["secret"]["secretName"]]} if "secret" in volume else {}
        for volume, files in texts.items():
            for file, text in files.items():
                (folder / volume / file).write_text(self.here(text).replace("0.0.0.0", "127.0.0.1"))

    def here(self, text: str) -> str:
        """Return the text with local paths."""
        return self._path.sub(lambda found: str(self._places[found[0]]), text)

    def start(self, **environment: str) -> ServerProcess:
        """Start the process; ``environment``: variables that Kubernetes and LeaderWorkerSet set."""
        given = {each["name"]: each["value"] for each in self.container.get("env", []) if "value" in each}
        given |= environment | {"HOME": self.here("/home/jaxinfer"), "TMPDIR": self.here("/tmp")}
        arguments = [self.here(each) for each in expanded(self.container["args"], environment)]
        run = ["-m", "tests.fleet.contained", str(self.folder), "-m", "jaxinfer", *arguments]
        allowed = contained.is_allowed(str(self.folder))
        log = self.folder.parent / f"{self.folder.name}.log"
        return ServerProcess(run if allowed else run[3:], log, environment=given)

    def probe(self, kind: str) -> str:
        """Return the URL of the kubelet's probe."""
        asked = self.container[f"{kind}Probe"]["httpGet"]
        (port,) = (each["containerPort"] for each in self.container["ports"] if each["name"] == asked["port"])
        return f"{asked['scheme'].lower()}://127.0.0.1:{port}{asked['path']}"

    @property
    def grace(self) -> int:
        found: int = self.pod["spec"]["terminationGracePeriodSeconds"]
        return found


def status(url: str) -> int | None:
    """Return the HTTP status, without certificate checks like the kubelet; None: no response."""
    try:
        return httpx.get(url, verify=False, timeout=60).status_code
    except httpx.TransportError:
        return None


@contextlib.contextmanager
def ended(*servers: ServerProcess) -> Iterator[None]:
    try:
        yield
    finally:
        for each in servers:
            each.end()


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    """Yield a folder with a short path, because sockets are below it as in /tmp of a container."""
    with tempfile.TemporaryDirectory(prefix="pods-") as place:
        yield pathlib.Path(place)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
def test_a_pod_serves_answers_its_probes_and_drains(tmp_path: pathlib.Path, folder: pathlib.Path) -> None:
    certificate, key = certify(tmp_path, "pod")
    values = small("demo", tls={"secret": "certificate"})
    rendered = Rendered(values)
    keys = rendered.one("Secret")
    secrets = {
        keys["metadata"]["name"]: keys["stringData"],
        "certificate": {"tls.crt": certificate.read_text(), "tls.key": key.read_text()},
    }
    pod = Pod(rendered, "server", folder / "server", secrets)
    server = pod.start()
    with ended(server):
        wait_until(lambda: status(pod.probe("startup")) == 200 or server.process.poll() is not None)
        wait_until(lambda: status(pod.probe("readiness")) == 200 or server.process.poll() is not None, 300)
        assert status(pod.probe("liveness")) == 200, server.log()
        _check_doors(values["config"], trusting(certificate))
        assert list((folder / "server/programs").iterdir()), "no compiled program was kept"
        _check_drain(pod, server)


def _check_doors(config: Values, trust: Any) -> None:
    """Check that requests with a key succeed, and that others are rejected."""

    def figures(key: str) -> int:
        bearer = {"authorization": f"Bearer {key}"}
        found = httpx.get(
            f"https://127.0.0.1:{config['metrics_port']}/metrics", headers=bearer, verify=trust, timeout=60
        )
        return found.status_code

    assert [figures(key) for key in (*KEYS.values(), "wrong")] == [403, 200, 401]
    body = {"model": "demo", "prompt": "ROMEO:", "max_tokens": 4}
    url = f"https://127.0.0.1:{config['http_port']}/v1/completions"
    alice = {"authorization": f"Bearer {KEYS['alice']}"}
    answer = httpx.post(url, json=body, headers=alice, verify=trust, timeout=BOUND)
    assert answer.json()["usage"]["completion_tokens"] == 4


def _check_drain(pod: Pod, server: ServerProcess) -> None:
    """Check that the server's drain ends before the kubelet's grace period."""
    start = time.monotonic()
    server.signal(signal.SIGTERM)
    wait_until(lambda: status(pod.probe("readiness")) != 200)
    assert (status(pod.probe("readiness")), status(pod.probe("liveness"))) == (503, 200)
    assert server.wait(pod.grace) == 0
    assert time.monotonic() - start < pod.grace


def test_it_can_write_where_it_must_alone(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The container is read-only except for the folder, on which the other tests rely."""
    if not contained.is_allowed(str(folder)):
        pytest.skip("namespaces cannot be made here")
    outside = tmp_path / "outside"
    script = f"import os; print(os.getuid()); open({str(folder / 'x')!r}, 'w'); open({str(outside)!r}, 'w')"
    found = subprocess.run(
        [sys.executable, "-m", "tests.fleet.contained", str(folder), "-c", script], capture_output=True, timeout=60
    )
    assert found.stdout == b"10001\n"
    assert b"Read-only file system" in found.stderr
    assert (folder / "x").exists()
    assert not outside.exists()


def test_envoy_of_the_chart_leads_to_a_pod(tmp_path: pathlib.Path, programs: pathlib.Path) -> None:
    """Envoy with the rendered configuration, except for local names and addresses, routes requests to a pod."""
    with fake_server(tmp_path) as server:
        ports = {"http_port": server.http_port, "grpc_port": server.grpc_port}
        rendered = Rendered({"envoy": {"enabled": True}, "config": ports})
        text = rendered.one("ConfigMap", proxy=True)["data"]["envoy.yaml"].replace("0.0.0.0", "127.0.0.1")
        own = dict(zip((8080, 50050, 9901), free_ports(3), strict=True))
        text = re.sub(r"(?<=port_value: )\d+", lambda found: str(own.get(int(found[0]), found[0])), text)
        file = tmp_path / "envoy.yaml"
        file.write_text(text.replace("address: prod-jaxinfer-grpc", "address: localhost"))
        command = container(rendered.one("Deployment", proxy=True)["spec"]["template"])["command"]
        options = [str(file) if each.startswith("/etc/envoy/") else each for each in command[1:]]
        with (tmp_path / "envoy.log").open("wb") as log:
            envoy = subprocess.Popen([programs / command[0], *options], stdout=log, stderr=log)
        try:
            wait_until(lambda: status(f"http://127.0.0.1:{own[8080]}/ready") == 200 or envoy.poll() is not None)
            answer = httpx.get(f"http://127.0.0.1:{own[8080]}/v1/models", timeout=60)
            assert [each["id"] for each in answer.json()["data"]] == ["fake"], (tmp_path / "envoy.log").read_text()
            with Client(f"127.0.0.1:{own[50050]}") as client:
                client.wait_ready(timeout=BOUND)
                assert client.generate("a b", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3
        finally:
            envoy.kill()
            envoy.wait()


@pytest.mark.slow
def test_a_group_finds_itself_serves_and_drains(folder: pathlib.Path) -> None:
    """Two pods of a LeaderWorkerSet run with the variables of its controller. SIGTERM is sent as by the kubelet: to the
    leader at once, to the follower after the sleep of its hook."""
    coordinator = free_ports(1)[0]
    values = small(
        "demo-draft",
        mode="LeaderWorkerSet",
        leaderWorkerSet={"size": 2, "groupKey": {"secret": "group"}, "coordinatorPort": coordinator},
        extraEnv=[{"name": "XLA_FLAGS", "value": "--xla_force_host_platform_device_count=2"}],
        config={"engine": {"tensor_parallel_size": 4}},
    )
    rendered = Rendered(values)
    keys = rendered.one("Secret")
    secrets = {keys["metadata"]["name"]: keys["stringData"], "group": {"group.key": "0123456789abcdef" * 2}}
    pods = {name: Pod(rendered, name, folder / name, secrets) for name in ("leader", "follower")}
    variables = {"LWS_LEADER_ADDRESS": "localhost", "LWS_GROUP_SIZE": "2"}
    follower = pods["follower"].start(LWS_WORKER_INDEX="1", **variables)
    leader = pods["leader"].start(LWS_WORKER_INDEX="0", POD_IP="127.0.0.1", **variables)
    with ended(leader, follower), concurrent.futures.ThreadPoolExecutor() as pool:
        wait_until(lambda: status(pods["leader"].probe("readiness")) == 200 or leader.process.poll() is not None, 300)
        asked = pool.submit(_whole_answer, values["config"])
        wait_until(lambda: 'num_requests_running{model_name="demo-draft"} 1.0' in _figures(values["config"]))
        leader.signal(signal.SIGTERM)
        assert asked.result(BOUND)["usage"]["completion_tokens"] == 200
        slept = pods["follower"].container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert leader.wait(slept) == 0
        follower.signal(signal.SIGTERM)
        assert follower.wait(pods["follower"].grace - slept + BOUND) == 0


def _figures(config: Values) -> str:
    bearer = {"authorization": f"Bearer {KEYS['prometheus']}"}
    return httpx.get(f"http://127.0.0.1:{config['metrics_port']}/metrics", headers=bearer, timeout=60).text


def _whole_answer(config: Values) -> Any:
    body = {"model": "demo-draft", "prompt": "ROMEO:", "max_tokens": 200, "ignore_eos": True}
    url = f"http://127.0.0.1:{config['http_port']}/v1/completions"
    answer = httpx.post(url, json=body, headers={"authorization": f"Bearer {KEYS['alice']}"}, timeout=BOUND)
    return answer.json()
