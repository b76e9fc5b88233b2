"""The Grafana dashboard and docs/metrics.md know what /metrics shows, and nothing else."""

from __future__ import annotations

import json
import pathlib
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.client import Client, InvalidRequest
from tests.serve.live import Live, live_fake

_NAME = re.compile(r"\b(jaxinfer:\w+|process_\w+)")
# What a histogram's or a counter's samples have behind the name of the family.
_SUFFIX = re.compile(r"_(bucket|sum|count|total|created)$")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_fake(tmp_path_factory.mktemp("model")) as found:
        yield found


@pytest.fixture(scope="module")
def samples(server: Live) -> dict[str, set[str]]:
    """What a scrape shows after a little of everything: sample -> its labels."""
    with Client(server.target) as client:
        client.generate("Hi", max_tokens=4, seed=1)
        with pytest.raises(InvalidRequest):
            client.generate("Hi", max_tokens=-1)
    _post(server, "/v1/completions", {"prompt": "Hi", "max_tokens": 4})
    with pytest.raises(urllib.error.HTTPError):
        _post(server, "/v1/completions", {"prompt": "Hi", "max_tokens": -1})
    server.loop.call_soon_threadsafe(server.server._door.metrics.http_cut.labels("head").inc)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(_scrape(server)):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def _post(server: Live, path: str, body: dict[str, Any]) -> None:
    head = {"content-type": "application/json"}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), head)
    urllib.request.urlopen(request, timeout=30).close()


def _scrape(server: Live) -> str:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        return str(answer.read(), "utf-8")


@pytest.fixture(scope="module")
def board(repo: pathlib.Path) -> dict[str, Any]:
    return json.loads((repo / "configs/grafana/jaxinfer.json").read_text(encoding="utf-8"))


def expressions(board: dict[str, Any]) -> list[str]:
    """Every query, those of variables and annotations too."""
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    queries += [variable["definition"] for variable in board["templating"]["list"] if "definition" in variable]
    return queries + [each["expr"] for each in board["annotations"]["list"]]


def test_the_server_counts_what_happened(server: Live, samples: dict[str, set[str]]) -> None:
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(_scrape(server))
        for sample in family.samples
    }
    method = ("method", "jaxinfer.v1.Inference/Generate")
    assert values["jaxinfer:grpc_requests_total", ("code", "OK"), method] == 1
    assert values["jaxinfer:grpc_requests_total", ("code", "INVALID_ARGUMENT"), method] == 1
    assert values["jaxinfer:grpc_request_duration_seconds_count", method] == 2
    assert values["jaxinfer:request_errors_total", ("kind", "invalid")] == 2
    assert values["jaxinfer:request_errors_total", ("kind", "internal")] == 0
    assert values["jaxinfer:http_request_duration_seconds_count", ("route", "/v1/completions")] == 2
    assert values["jaxinfer:engine_state", ("state", "ready")] == 1
    assert values["jaxinfer:engine_state", ("state", "dead")] == 0
    assert (values["jaxinfer:engine_restarts_total",], values["jaxinfer:ready",]) == (0, 1)


def test_every_metric_of_the_dashboard_is_shown(board: dict[str, Any], samples: dict[str, set[str]]) -> None:
    asked = {name for expression in expressions(board) for name in _NAME.findall(expression)}
    assert asked - samples.keys() == set()


def test_every_figure_of_ours_is_on_the_dashboard(board: dict[str, Any], samples: dict[str, set[str]]) -> None:
    on_it = {_SUFFIX.sub("", name) for expression in expressions(board) for name in _NAME.findall(expression)}
    assert {_SUFFIX.sub("", name) for name in samples if name.startswith("jaxinfer:")} - on_it == set()


def test_labels_of_the_dashboard_are_those_of_the_metrics(board: dict[str, Any], samples: dict[str, set[str]]) -> None:
    given_by_prometheus = {"instance"}
    for expression in expressions(board):
        named = _NAME.findall(expression)
        known = set.intersection(*(samples[name] for name in named)) | given_by_prometheus
        selected = {label for braces in re.findall(r"{(.*?)}", expression) for label in re.findall(r"(\w+)=", braces)}
        grouped = {label.strip() for by in re.findall(r"by \((.*?)\)", expression) for label in by.split(",")}
        assert named
        assert selected | grouped <= known, expression


def test_panels_have_a_place_and_an_id_of_their_own(board: dict[str, Any]) -> None:
    assert board["schemaVersion"] >= 39
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or (panel["targets"] and panel["description"].endswith("."))


def test_the_page_about_metrics_names_them_all(repo: pathlib.Path, samples: dict[str, set[str]]) -> None:
    page = (repo / "docs/metrics.md").read_text(encoding="utf-8")
    cells = " ".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))
    named = {name.partition("{")[0] for name in re.findall(r"`([\w{},]+)`", cells)}
    shown = {_SUFFIX.sub("", name).removeprefix("jaxinfer:") for name in samples if name.startswith("jaxinfer:")}
    assert named == shown
