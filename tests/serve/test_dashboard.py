"""Tests that the Grafana dashboard and docs/metrics.md match the metrics of /metrics."""

from __future__ import annotations

import json
import pathlib
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.client import Client, InvalidRequest
from jaxinfer.serve.telemetry.metrics import render
from tests.serve.live import Live, live_fake
from tests.serve.telemetry.test_metrics import busy

_NAME = re.compile(r"\b(jaxinfer:\w+|process_\w+)")
# Suffixes of histogram and counter samples after the name of the family.
_SUFFIX = re.compile(r"_(bucket|sum|count|total|created)$")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_fake(tmp_path_factory.mktemp("model")) as found:
        yield found


@pytest.fixture(scope="module")
def samples(server: Live) -> dict[str, set[str]]:
    """Return the labels of each sample after requests of every kind."""
    with Client(server.target) as client:
        client.generate("Hi", max_tokens=4, seed=1)
        with pytest.raises(InvalidRequest):
            client.generate("Hi", max_tokens=-1)
    _post(server, "/v1/completions", {"prompt": "Hi", "max_tokens": 4})
    with pytest.raises(urllib.error.HTTPError):
        _post(server, "/v1/completions", {"prompt": "Hi", "max_tokens": -1})
    server.loop.call_soon_threadsafe(server.server._door.metrics.http_cut.labels("head").inc)
    found: dict[str, set[str]] = {}
    with_adapters = render(busy, "fake").decode()  # an engine with LoRA adapters
    for family in text_string_to_metric_families(f"{_scrape(server)}{with_adapters}"):
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
    """Return every query, including those of variables and annotations."""
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


def test_every_alarm_asks_for_what_is_shown(repo: pathlib.Path, samples: dict[str, set[str]]) -> None:
    (group,) = yaml.safe_load((repo / "configs/prometheus/alerts.yaml").read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) >= 5
    for rule in group["rules"]:
        promql.parse(rule["expr"])  # raises ValueError
        asked = set(_NAME.findall(rule["expr"]))
        assert asked <= samples.keys(), rule["alert"]
        assert asked or rule["expr"].startswith("up{")


def test_every_figure_of_ours_is_on_the_dashboard(board: dict[str, Any], samples: dict[str, set[str]]) -> None:
    on_it = {_SUFFIX.sub("", name) for expression in expressions(board) for name in _NAME.findall(expression)}
    assert {_SUFFIX.sub("", name) for name in samples if name.startswith("jaxinfer:")} - on_it == set()


def test_queries_ask_for_labels_that_there_are(board: dict[str, Any], samples: dict[str, set[str]]) -> None:
    for expression in expressions(board):
        if not expression.startswith("label_values("):
            labels_of(parsed(expression), samples)


def test_legends_name_labels_that_the_answer_has(board: dict[str, Any], samples: dict[str, set[str]]) -> None:
    told = [
        (target["expr"], target["legendFormat"]) for panel in board["panels"] for target in panel.get("targets", [])
    ]
    told += [(each["expr"], each["titleFormat"]) for each in board["annotations"]["list"]]
    for expression, legend in told:
        assert set(re.findall(r"{{(.*?)}}", legend)) == labels_of(parsed(expression), samples), expression


def parsed(expression: str) -> promql.Expr:
    """Parse an expression like Prometheus, including types, after Grafana's substitution; raises ValueError."""
    assert re.findall(r"\[(.*?)\]", expression) in ([], ["$__rate_interval"], ["$__rate_interval"] * 2)
    return promql.parse(expression.replace("$__rate_interval", "1m"))


def labels_of(tree: promql.Expr, samples: dict[str, set[str]]) -> set[str]:
    """Return the labels by which the resulting series differ; check the functions for each kind of metric."""
    match tree:
        case promql.VectorSelector():
            return _labels_of_selector(tree, samples)
        case promql.MatrixSelector():
            name = tree.vector_selector.name
            assert re.search("_(total|bucket|sum|count)$", name), f"{name} is no counter"
            return _labels_of_selector(tree.vector_selector, samples)
        case promql.Call(func=promql.Function(name="histogram_quantile")):
            found = labels_of(tree.args[1], samples)
            assert "le" in found
            return found - {"le"}
        case promql.Call(func=promql.Function(name="rate" | "changes")):
            return labels_of(tree.args[0], samples)
        case promql.AggregateExpr(modifier=None):
            labels_of(tree.expr, samples)
            return set()
        case promql.AggregateExpr():
            by = set(tree.modifier.labels)
            assert tree.modifier.type == promql.AggModifierType.By
            assert by <= labels_of(tree.expr, samples), by
            return by
        case promql.BinaryExpr(rhs=promql.NumberLiteral()):
            return labels_of(tree.lhs, samples)
        case promql.BinaryExpr(lhs=promql.NumberLiteral()):
            return labels_of(tree.rhs, samples)
        case promql.BinaryExpr(rhs=promql.Call(func=promql.Function(name="scalar"))):
            assert not labels_of(tree.rhs.args[0], samples), "a scalar is one number"
            return labels_of(tree.lhs, samples)
        case promql.BinaryExpr():
            left = labels_of(tree.lhs, samples)
            assert left == labels_of(tree.rhs, samples), "nothing would match"
            return left
    raise AssertionError(f"{tree} is of no kind that is used here")


def _labels_of_selector(selector: promql.VectorSelector, samples: dict[str, set[str]]) -> set[str]:
    """Return the labels of the selected series; check the selection by server, and by model if the metric has it."""
    known = samples[selector.name] | {"instance"}  # added by Prometheus
    chosen = {each.name: each.value for each in selector.matchers.matchers}
    assert all(each.op == promql.MatchOp.Re for each in selector.matchers.matchers)
    variables = {"instance": "$instance", "model_name": "$model"}
    assert chosen == {label: text for label, text in variables.items() if label in known}
    return known - {"model_name"}


@pytest.mark.parametrize(
    "broken",
    [
        "sum(rate(jaxinfer:engine_steps_total[$__rate_interval])",
        "rate(jaxinfer:engine_steps_total)",
        "rates(jaxinfer:engine_steps_total[$__rate_interval])",
        'sum by (reason) (jaxinfer:num_requests_running{model_name=~"$model",instance=~"$instance"})',
        'jaxinfer:num_requests_running{model_name=~"$model"}',
        'jaxinfer:num_requests_running{model_name="$model",instance=~"$instance"}',
        'jaxinfer:ready{model_name=~"$model",instance=~"$instance"}',
        'rate(jaxinfer:num_requests_running{model_name=~"$model",instance=~"$instance"}[$__rate_interval])',
        'rate(jaxinfer:engine_steps_total{model_name=~"$model",instance=~"$instance"}[5m])',
        'histogram_quantile(0.5, sum(rate(jaxinfer:http_request_duration_seconds_bucket{instance=~"$instance"}'
        "[$__rate_interval])))",
    ],
)
def test_broken_queries_would_be_seen(broken: str, samples: dict[str, set[str]]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        labels_of(parsed(broken), samples)


# ---- the file


def test_the_board_has_what_an_import_needs(board: dict[str, Any]) -> None:
    assert board["schemaVersion"] >= 39
    assert "id" not in board  # an id would overwrite the existing board with that id
    assert re.fullmatch(r"[\w-]{1,40}", board["uid"])
    assert board["title"]
    assert board["time"].keys() == {"from", "to"}
    assert re.fullmatch(r"\d+[smh]", board["refresh"])
    assert board["editable"] is True


def test_every_query_goes_to_the_data_source_that_was_picked(board: dict[str, Any]) -> None:
    first, *others = board["templating"]["list"]
    assert (first["name"], first["type"], first["query"]) == ("datasource", "datasource", "prometheus")
    asking = [panel for panel in board["panels"] if panel["type"] != "row"]
    asking += [target for panel in asking for target in panel["targets"]] + others + board["annotations"]["list"]
    assert all(each["datasource"] == {"type": "prometheus", "uid": "${datasource}"} for each in asking)


def test_variables_are_defined_and_used(board: dict[str, Any], samples: dict[str, set[str]]) -> None:
    defined = {variable["name"] for variable in board["templating"]["list"]}
    text = json.dumps({**board, "templating": None})
    assert set(re.findall(r"\$\{?(\w+)", text)) == defined | {"__rate_interval"}
    for variable in board["templating"]["list"][1:]:
        assert variable["query"] == {"query": variable["definition"], "refId": variable["name"]}
        name, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", variable["definition"]).groups()
        assert label in samples[name] | {"instance"}
        assert variable["includeAll"]
        assert variable["multi"]
        assert variable["allValue"] == ".*"


def test_panels_are_whole(board: dict[str, Any]) -> None:
    units = {"none", "s", "percentunit", "bytes", "reqps", "ops", "short", "watt", "celsius"}
    for panel in board["panels"]:
        if panel["type"] == "row":
            assert panel["panels"] == []
            assert panel["collapsed"] is False
            continue
        assert panel["type"] in {"stat", "gauge", "timeseries"}
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"].keys() == {"defaults", "overrides"}
        assert panel["fieldConfig"]["defaults"].get("unit", "none") in units
        assert [target["refId"] for target in panel["targets"]] == list("ABCDE"[: len(panel["targets"])])
        assert panel["targets"]


def test_panels_have_a_place_and_an_id_of_their_own(board: dict[str, Any]) -> None:
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert cells
        assert 0 <= at["x"] < at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    rows = {y for _, y in taken}
    assert len(taken) == 24 * len(rows), "a hole"
    assert rows == set(range(max(rows) + 1)), "a gap"


# ---- the page


def test_the_page_about_metrics_names_them_all(repo: pathlib.Path, samples: dict[str, set[str]]) -> None:
    page = (repo / "docs/metrics.md").read_text(encoding="utf-8")
    cells = " ".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))
    named = {name.partition("{")[0] for name in re.findall(r"`([\w{},]+)`", cells)}
    shown = {_SUFFIX.sub("", name).removeprefix("jaxinfer:") for name in samples if name.startswith("jaxinfer:")}
    assert named == shown
