"""Static checks of the Dockerfile and the compose files, without a container engine."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from jaxinfer.cli.serve import parse
from jaxinfer.serve.settings import ServeConfig
from tests.serve.live import live_fake

COMPOSE = pathlib.Path("configs/compose")
SETTINGS = "configs/deployments/container.yaml"


@pytest.fixture(scope="module")
def steps(repo: pathlib.Path) -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments."""
    text = re.sub(r"^#.*\n", "", (repo / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


@pytest.fixture(scope="module")
def config(repo: pathlib.Path) -> ServeConfig:
    return settings_of(repo)


def settings_of(repo: pathlib.Path, *flags: str) -> ServeConfig:
    return parse(["--config", str(repo / SETTINGS), *flags]).configuration


def arguments(steps: list[tuple[str, str]], word: str) -> list[str]:
    return [rest for each, rest in steps if each == word]


def test_what_is_copied_is_what_a_wheel_is_built_from(repo: pathlib.Path, steps: list[tuple[str, str]]) -> None:
    """The COPY sources are the files from which tests/client/test_wheel.py builds a wheel."""
    copies = [rest.split() for rest in arguments(steps, "COPY") if not rest.startswith("--from")]
    sources = {source for copy in copies for source in copy[:-1]}
    assert sources == {"pyproject.toml", "README.md", "LICENSE", "jaxinfer", "pallas_kernels", SETTINGS}
    assert all((repo / source).exists() for source in sources)
    ignored = (repo / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert {source.removesuffix("/container.yaml") for source in sources} <= kept


def test_the_process_is_not_root_and_gets_signals_itself(steps: list[tuple[str, str]]) -> None:
    assert arguments(steps, "USER") == ["10001"]
    assert [json.loads(rest) for rest in arguments(steps, "ENTRYPOINT")] == [["jaxinfer"]]
    assert [json.loads(rest)[:2] for rest in arguments(steps, "CMD")] == [["serve", "--config"]]


def test_the_servers_settings_are_those_of_the_image(
    repo: pathlib.Path, config: ServeConfig, steps: list[tuple[str, str]]
) -> None:
    ports = {config.http_port, config.grpc_port, config.metrics_port}
    assert {str(port) for port in ports} == set(" ".join(arguments(steps, "EXPOSE")).split())
    assert arguments(steps, "VOLUME") == [config.compilation_cache_dir]
    assert settings_of(repo, "--model", "/models/x").model == "/models/x"


def test_the_health_check_runs(
    config: ServeConfig, steps: list[tuple[str, str]], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (check,) = arguments(steps, "HEALTHCHECK")
    program = json.loads(check.partition("CMD")[2])[2]
    assert f"127.0.0.1:{config.metrics_port}/" in program

    def healthy(port: int) -> bool:
        here = program.replace(f":{config.metrics_port}/", f":{port}/").replace("timeout=4", "timeout=60")
        return subprocess.run((sys.executable, "-c", here), capture_output=True, timeout=120).returncode == 0

    with live_fake(tmp_path, metrics_port=0) as server:
        port = server.server.metrics_port
        assert port is not None
        assert healthy(port)
    assert not healthy(port)


# ---- compose


@pytest.fixture(scope="module")
def services(repo: pathlib.Path) -> dict[str, Any]:
    text = (repo / COMPOSE / "compose.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    assert set(found["volumes"]) >= {"compiled", "models", "prometheus"}
    return found["services"]


def test_every_file_that_is_mounted_is_there(repo: pathlib.Path, services: dict[str, Any]) -> None:
    mounts = [mount.split(":")[0] for service in services.values() for mount in service["volumes"]]
    files = [mount for mount in mounts if mount.startswith(".")]
    assert len(files) == 5
    assert [file for file in files if not (repo / COMPOSE / file).is_file()] == []
    assert (repo / COMPOSE / services["jaxinfer"]["build"]["context"] / "Dockerfile").is_file()


def test_ports_are_published_on_loopback_alone(config: ServeConfig, services: dict[str, Any]) -> None:
    published = [port.rpartition(":") for service in services.values() for port in service.get("ports", [])]
    assert all(address.startswith("127.0.0.1:") for address, _, _ in published)
    inside = {int(port) for _, _, port in published}
    assert {config.http_port, config.grpc_port} <= inside
    assert config.metrics_port not in inside


def test_a_server_has_the_time_to_drain(config: ServeConfig, services: dict[str, Any]) -> None:
    assert int(services["jaxinfer"]["stop_grace_period"].removesuffix("s")) > config.drain_seconds


def test_prometheus_scrapes_the_server_and_grafana_asks_prometheus(
    repo: pathlib.Path, config: ServeConfig, services: dict[str, Any]
) -> None:
    def read(name: str) -> Any:
        return yaml.safe_load((repo / COMPOSE / name).read_text(encoding="utf-8"))

    (job,) = read("prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"jaxinfer:{config.metrics_port}"]}]
    (source,) = read("grafana/datasources.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert {"jaxinfer", "prometheus"} <= set(services)
    (provider,) = read("grafana/dashboards.yaml")["providers"]
    folder = provider["options"]["path"]
    assert any(f":{folder}/jaxinfer.json:" in mount for mount in services["grafana"]["volumes"])
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{folder}/jaxinfer.json"


def test_the_file_for_gpus_changes_services_that_there_are(repo: pathlib.Path, services: dict[str, Any]) -> None:
    more = yaml.safe_load((repo / COMPOSE / "cuda.yaml").read_text(encoding="utf-8"))["services"]
    assert set(more) <= set(services)
    extra = more["jaxinfer"]["build"]["args"]["EXTRA"]
    assert f"\n{extra} = [" in (repo / "pyproject.toml").read_text(encoding="utf-8")
