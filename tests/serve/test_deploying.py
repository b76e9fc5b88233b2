"""Tests of docs/deploying.md: configuration files of other programs are valid and match the described deployment."""

import configparser
import pathlib
import re

import pytest
import yaml

from jaxinfer.serve.settings import ServeLimits, make_config, read_settings


class Unit(configparser.ConfigParser):
    """Parser of systemd unit files: names keep their case."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


@pytest.fixture(scope="module")
def page(repo: pathlib.Path) -> str:
    return (repo / "docs" / "deploying.md").read_text()


@pytest.fixture(scope="module")
def production(repo: pathlib.Path):
    return make_config(read_settings(repo / "configs" / "deployments" / "production.yaml"))


def test_orchestrators_wait_for_the_delay_and_the_drain_and_ten_seconds_more(page, production):
    seconds = production.drain_delay + production.drain_seconds + 10
    (scrape,) = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    assert scrape["scrape_configs"][0]["static_configs"][0]["targets"][0].endswith(f":{production.metrics_port}")
    unit = Unit(strict=False)
    unit.read_string(re.findall(r"```ini\n(.*?)```", page, re.DOTALL)[0])
    assert int(unit["Service"]["TimeoutStopSec"]) == seconds
    assert f"--stop-timeout {seconds:.0f}" in page


def test_haproxy_notices_within_the_delay(repo, production):
    """The failed checks, their intervals and the timeout of each are within the drain delay."""
    text = (repo / "configs/haproxy/haproxy.cfg").read_text()
    check = re.search(r"check inter (\d+)s fastinter (\d+)ms fall (\d+)", text)
    timeout = re.search(r"timeout check (\d+)s", text)
    assert check is not None
    assert timeout is not None
    pause, fast, fall, seconds = int(check[1]), int(check[2]) / 1000, int(check[3]), int(timeout[1])
    assert pause + fast * (fall - 1) + fall * seconds < production.drain_delay


def test_envoy_notices_within_the_delay(repo, production):
    text = (repo / "configs/envoy/envoy.yaml").read_text()
    clusters = yaml.safe_load(text)["static_resources"]["clusters"]
    assert [cluster["name"] for cluster in clusters] == ["http_api", "grpc_api"]
    for (check,) in (cluster["health_checks"] for cluster in clusters):
        pause, seconds = float(check["interval"][:-1]), float(check["timeout"][:-1])
        assert check["unhealthy_threshold"] * (pause + seconds) < production.drain_delay
        assert check["no_traffic_interval"] == check["interval"]


def test_balancers_bound_what_the_server_bounds(repo, production):
    """The balancers limit body and header sizes, and slightly fewer connections than the server."""
    envoy, haproxy = ((repo / "configs" / file).read_text() for file in ("envoy/envoy.yaml", "haproxy/haproxy.cfg"))
    limit = ServeLimits().message_bytes
    assert f"max_request_bytes: {limit}" in envoy
    assert f"req.hdr_val(content-length) gt {limit}" in haproxy
    assert "max_connections: 1000\n" in envoy
    assert haproxy.count("maxconn 1000\n") == 2
    assert production.max_connections > 1000
