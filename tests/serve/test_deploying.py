"""docs/deploying.md: what others' programs read is well formed and fits the deployment that it speaks of."""

import configparser
import pathlib
import re
import subprocess

import pytest
import yaml

from jaxinfer.serve.settings import make_config, read_settings
from tests.serve.rolling import HAPROXY, documented


class Unit(configparser.ConfigParser):
    """A file of systemd: names keep their capitals."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


@pytest.fixture(scope="module")
def page(repo: pathlib.Path) -> str:
    return (repo / "docs" / "deploying.md").read_text()


@pytest.fixture(scope="module")
def production(repo: pathlib.Path):
    return make_config(read_settings(repo / "configs" / "deployments" / "production.yaml"))


@pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")
def test_haproxy_takes_its_configuration(tmp_path):
    config = tmp_path / "haproxy.cfg"
    config.write_text(documented())
    assert HAPROXY is not None
    checked = subprocess.run([HAPROXY, "-c", "-f", str(config)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_orchestrators_wait_for_the_delay_and_the_drain_and_ten_seconds_more(page, production):
    seconds = production.drain_delay + production.drain_seconds + 10
    deployment, scrape = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    pod = deployment["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == seconds
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": production.http_port, "grpc": production.grpc_port, "metrics": production.metrics_port}
    assert scrape["scrape_configs"][0]["static_configs"][0]["targets"][0].endswith(f":{production.metrics_port}")
    unit = Unit(strict=False)
    unit.read_string(re.findall(r"```ini\n(.*?)```", page, re.DOTALL)[0])
    assert int(unit["Service"]["TimeoutStopSec"]) == seconds
    assert f"--stop-timeout {seconds:.0f}" in page


def test_a_balancer_notices_within_the_delay(production):
    """Checks that must fail, the pauses between them, and the time-out of one."""
    found = re.search(r"inter (\d+)s fall (\d+)", documented())
    assert found is not None
    assert int(found[1]) * (int(found[2]) + 1) + 2 < production.drain_delay
