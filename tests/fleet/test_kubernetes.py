"""Tests of the Helm chart (docs/kubernetes.md): all variants are valid for Kubernetes and the operators, unsupported
values are rejected by name, and all references exist."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.fleet.chart import (
    CHART,
    VERSIONS,
    Object,
    Rendered,
    Values,
    check,
    container,
    found_by,
    merged,
    selected,
    settings_of,
)
from tests.fleet.forms import ENVOY, EVENTS, FORMS, GROUP, KEY, PICKER, ROUTE, SEEN, SEEN_BY_TLS, TLS, form


@pytest.fixture(scope="module", params=FORMS)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return form(request.param)


# ---- schemas of Kubernetes and the operators


def test_every_object_is_one_of_its_kind(rendered: Rendered) -> None:
    assert len(rendered.objects) >= 4
    check(rendered)


def test_there_are_all_kinds() -> None:
    kinds = {each["kind"] for name in FORMS for each in form(name).objects}
    of_kubernetes = "ConfigMap Secret Service ServiceAccount Deployment PodDisruptionBudget NetworkPolicy"
    of_others = "LeaderWorkerSet HTTPRoute GRPCRoute InferencePool PodMonitor ScaledObject HorizontalPodAutoscaler"
    assert kinds == {*of_kubernetes.split(), *of_others.split()}
    assert VERSIONS[0] != VERSIONS[1]


WRONG: dict[str, tuple[Values, str, tuple[str | int, ...], object]] = {
    "a field of Deployment": ({}, "Deployment", ("spec", "replica"), 1),
    "a field of a pod": ({}, "Deployment", ("spec", "template", "spec", "container"), []),
    "a port of Service": ({}, "Service", ("spec", "ports", 0, "port"), "http"),
    "a policy of LeaderWorkerSet": (GROUP, "LeaderWorkerSet", ("spec", "startupPolicy"), "Leader"),
    "a field of LeaderWorkerSet": (GROUP, "LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "workers"), 3),
    "a port of InferencePool": (PICKER, "InferencePool", ("spec", "targetPorts", 0, "number"), 70000),
    "the older selector of InferencePool": (PICKER, "InferencePool", ("spec", "selector"), {"app": "jaxinfer"}),
    "a timeout of HTTPRoute": (ROUTE, "HTTPRoute", ("spec", "rules", 0, "timeouts", "request"), "600"),
    "a backend of GRPCRoute": (ROUTE, "GRPCRoute", ("spec", "rules", 0, "backendRefs", 0, "service"), "x"),
    "a scheme of PodMonitor": (SEEN, "PodMonitor", ("spec", "podMetricsEndpoints", 0, "scheme"), "tls"),
    "a threshold of ScaledObject": (
        {"autoscaling": {"kind": "keda"}},
        "ScaledObject",
        ("spec", "triggers", 0, "metadata", "threshold"),
        8,
    ),
    "a target of the autoscaler": ({"autoscaling": {"kind": "hpa"}}, "HorizontalPodAutoscaler", ("spec", "metric"), []),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_schemas_refuse_what_is_wrong(name: str) -> None:
    values, kind, (*path, last), wrong = WRONG[name]
    rendered = Rendered(values)
    place: Any = next(each for each in rendered.objects if each["kind"] == kind)
    for step in path:
        place = place[step]
    place[last] = wrong
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(rendered)


def test_helm_finds_nothing_to_complain_of() -> None:
    for values in ({}, GROUP, PICKER, SEEN_BY_TLS):
        report = helm_python.lint(CHART, values, strict=True, kube_version="v1.30.0")
        assert report["errors"] == []
        assert [each for each in report["messages"] if each["severity"] > 1] == []


# ---- values that helm rejects

REFUSED: list[tuple[Values, str]] = [
    ({"mode": "StatefulSet"}, "mode"),
    ({"replica": 3}, "replica"),
    ({"replicas": "two"}, "replicas"),
    ({"replicas": -1}, "replicas"),
    ({"maxUnavailable": 0}, "maxUnavailable"),
    ({"image": {"tag": "not a tag"}}, "image/tag"),
    ({"listen": "127.0.0.1"}, "listen"),
    ({"config": {"max_num_seqs": 4}}, "max_num_seqs"),
    ({"config": {"engine": {"max_num_seqz": 4}}}, "max_num_seqz"),
    ({"config": {"engine": {"max_num_seqs": "many"}}}, "max_num_seqs"),
    ({"config": {"grpc_port": 80}}, "grpc_port"),
    ({"config": {"metrics_port": 0}}, "metrics_port"),
    ({"config": {"http_port": 70000}}, "http_port"),
    ({"config": {"drain_delay": -1}}, "drain_delay"),
    ({"config": {"drain_seconds": None}}, "drain_seconds"),
    ({"config": {"drain_seconds": 0}}, "drain_seconds"),
    ({"config": {"group_timeout": 0}}, "group_timeout"),
    ({"config": {"model": None}}, "model"),
    ({"config": {"api_keys": "/keys"}}, "api_keys"),
    ({"config": {"host": "127.0.0.1"}}, "host"),
    ({"config": {"num_processes": 2}}, "num_processes"),
    ({"config": {"tls_client_ca": "/ca"}}, "tls_client_ca"),
    ({"apiKeys": {"secret": ""}}, "apiKeys.secret"),
    ({"apiKeys": {"entries": [KEY]}}, "apiKeys.entries"),
    ({"apiKeys": {"secret": "", "entries": [KEY | {"sha256": "secret"}]}}, "sha256"),
    ({"apiKeys": {"secret": "", "entries": [KEY | {"key": "secret"}]}}, "key"),
    ({"mode": "LeaderWorkerSet"}, "leaderWorkerSet.groupKey.secret"),
    (merged(GROUP, {"leaderWorkerSet": {"size": 1}}), "leaderWorkerSet/size"),
    ({"resources": {"limits": {"memory": "lots"}}}, "resources/limits/memory"),
    ({"programs": {"claim": "a", "hostPath": "/b"}}, "programs.hostPath"),
    ({"programs": {"hostPath": "cache"}}, "programs/hostPath"),
    ({"runAsUser": 0}, "runAsUser"),
    ({"podLabels": {"app.kubernetes.io/component": "other"}}, "app.kubernetes.io/component"),
    ({"podMonitor": {"enabled": True}}, "podMonitor.keySecret"),
    (merged(SEEN, TLS), "podMonitor.ca"),
    ({"gateway": {"enabled": True}}, "gateway.parents"),
    (merged(ROUTE, TLS), "tls.secret"),
    (merged(ROUTE, {"config": {"http_port": "off"}}), "config.http_port"),
    ({"gateway": {"endpointPicker": {"name": "picker"}}}, "gateway.enabled"),
    (merged(ROUTE, {"gateway": {"timeout": "10"}}), "gateway/timeout"),
    (merged(ROUTE, ENVOY), "envoy.enabled and gateway.enabled"),
    (merged(ENVOY, TLS), "envoy.enabled and tls.secret"),
    (merged(ENVOY, {"config": {"http_port": "off"}}), "config.http_port"),
    ({"envoy": {"image": "envoy proxy"}}, "envoy/image"),
    ({"kvEvents": {"enabled": True}}, "networkPolicy.routers"),
    (merged(EVENTS, {"networkPolicy": {"enabled": False}}), "networkPolicy.enabled"),
    ({"config": {"kv_events": True}}, "kv_events"),
    ({"autoscaling": {"kind": "vpa"}}, "autoscaling/kind"),
    ({"autoscaling": {"kind": "hpa", "minReplicas": 9}}, "autoscaling.minReplicas"),
    ({"autoscaling": {"metric": "rate(x)"}}, "autoscaling/metric"),
    ({"autoscaling": {"busy": 101}}, "autoscaling/busy"),
    ({"extraEnv": [{"value": "x"}]}, "extraEnv"),
]


@pytest.mark.parametrize(("values", "name"), REFUSED)
def test_a_wrong_value_is_refused_by_its_name(values: Values, name: str) -> None:
    with pytest.raises(helm_python.HelmError, match=re.escape(name)):
        Rendered(values)


def test_every_value_has_its_default_its_meaning_and_its_type() -> None:
    """Each line of values.yaml has a comment; values.schema.json has the same names, except global."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    bare = [line for line in text.splitlines() if line.strip() and "#" not in line]
    assert bare == []
    values = yaml.safe_load(text)
    with helm_python.Chart.load(CHART) as chart:
        schema = chart.schema
    assert schema is not None
    _check_names(values, schema["properties"] | {"global": {}}, ())


def _check_names(values: Object, properties: Object, path: tuple[str, ...]) -> None:
    assert path[:1] == ("config",) or set(values) == set(properties) - {"global"}, path
    for name, value in values.items():
        inner = properties[name]
        if isinstance(value, dict) and inner.get("additionalProperties") is False:
            _check_names(value, inner["properties"], (*path, name))


# ---- references


def test_every_reference_leads_somewhere(rendered: Rendered) -> None:
    account = rendered.one("ServiceAccount")["metadata"]["name"]
    for pod in rendered.pods.values():
        spec, inner = pod["spec"], container(pod)
        assert spec["serviceAccountName"] == account
        assert {each["name"] for each in inner["volumeMounts"]} == {each["name"] for each in spec["volumes"]}
        places = [each["mountPath"] for each in inner["volumeMounts"]]
        assert len(set(places)) == len(places)
        (config,) = (each["configMap"]["name"] for each in spec["volumes"] if each["name"] == "config")
        assert config == rendered.one("ConfigMap")["metadata"]["name"]
    for secret in rendered.of_kind("Secret"):
        assert secret["metadata"]["name"] in str(rendered.pods)


def test_selectors_find_the_pods_that_they_mean(rendered: Rendered) -> None:
    doors = {name: name != "follower" for name in rendered.pods}
    of_doors = [each["spec"]["selector"] for each in rendered.of_kind("Service")]
    for kind in ("Deployment", "PodMonitor", "InferencePool"):
        of_doors += [each["spec"]["selector"]["matchLabels"] for each in rendered.of_kind(kind)]
    for pod in rendered.pods.values():
        constraints = pod["spec"].get("topologySpreadConstraints", [])
        of_doors += [each["labelSelector"]["matchLabels"] for each in constraints]
    for selector in of_doors:
        assert found_by(rendered, selector) == doors
    for budget in rendered.of_kind("PodDisruptionBudget"):
        assert found_by(rendered, budget["spec"]["selector"]["matchLabels"]) == dict.fromkeys(doors, True)


def test_ports_are_those_of_the_settings(rendered: Rendered) -> None:
    settings = settings_of(rendered)
    wanted = {"grpc": settings.grpc_port, "metrics": settings.metrics_port}
    wanted |= {"http": settings.http_port} if settings.http_port is not None else {}
    events = {"kv-events": settings.kv_events_endpoint, "kv-replay": settings.kv_events_replay_endpoint or ""}
    direct = {name: int(each.rpartition(":")[2]) for name, each in events.items() if settings.kv_events}
    for name, pod in rendered.pods.items():
        ports = {each["name"]: each["containerPort"] for each in container(pod).get("ports", [])}
        assert ports == ({} if name == "follower" else wanted | direct)
    served = {
        port["targetPort"]: port["port"] for each in rendered.of_kind("Service") for port in each["spec"]["ports"]
    }
    assert served == wanted
    for monitor in rendered.of_kind("PodMonitor"):
        assert [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]


def test_routes_lead_to_what_there_is(rendered: Rendered) -> None:
    services = {each["metadata"]["name"]: each["spec"]["ports"][0]["port"] for each in rendered.of_kind("Service")}
    pools = {each["metadata"]["name"] for each in rendered.of_kind("InferencePool")}
    for route in (*rendered.of_kind("HTTPRoute"), *rendered.of_kind("GRPCRoute")):
        (backend,) = (backend for rule in route["spec"]["rules"] for backend in rule["backendRefs"])
        if backend.get("kind") == "InferencePool":
            assert backend["name"] in pools
        else:
            assert services[backend["name"]] == backend["port"]
    for pool in rendered.of_kind("InferencePool"):
        assert pool["spec"]["targetPorts"] == [{"number": settings_of(rendered).http_port}]


def test_the_proxy_leads_to_the_pods_and_is_found_itself(rendered: Rendered) -> None:
    workloads = rendered.of_kind("Deployment", proxy=True)
    assert len(workloads) == ("STRICT_DNS" in str(rendered.objects))
    for workload in workloads:
        labels, settings = workload["spec"]["template"]["metadata"]["labels"], settings_of(rendered)
        config = yaml.safe_load(rendered.one("ConfigMap", proxy=True)["data"]["envoy.yaml"])
        places = {each["name"]: each["load_assignment"]["endpoints"] for each in config["static_resources"]["clusters"]}
        (headless,) = (each for each in rendered.of_kind("Service") if each["metadata"]["name"].endswith("-grpc"))
        for cluster, port in {"http_api": settings.http_port, "grpc_api": settings.grpc_port}.items():
            place = {"address": headless["metadata"]["name"], "port_value": port}
            assert places[cluster] == [{"lb_endpoints": [{"endpoint": {"address": {"socket_address": place}}}]}]
        listening = [
            each["address"]["socket_address"]["port_value"] for each in config["static_resources"]["listeners"]
        ]
        assert listening == [each["containerPort"] for each in container(workload["spec"]["template"])["ports"]][::-1]
        service, budget = (rendered.one(kind, proxy=True)["spec"] for kind in ("Service", "PodDisruptionBudget"))
        for selector in (service["selector"], budget["selector"]["matchLabels"]):
            assert selected(labels, selector)
            assert not any(found_by(rendered, selector).values())
        for service in rendered.of_kind("Service"):
            assert not selected(labels, service["spec"]["selector"])


def test_the_bounds_of_the_proxy_grow_with_the_engines(repo: pathlib.Path) -> None:
    """The limits of the proxy scale with the replicas; those in configs/envoy/envoy.yaml are for two."""
    shipped = _bounds((repo / "configs/envoy/envoy.yaml").read_text())
    for values, engines in (({}, 2), ({"replicas": 5}, 5), ({"autoscaling": {"kind": "hpa", "maxReplicas": 16}}, 16)):
        text = Rendered(merged(ENVOY, values)).one("ConfigMap", proxy=True)["data"]["envoy.yaml"]
        assert _bounds(text) == [each * engines / 2 for each in shipped]


def _bounds(text: str) -> list[float]:
    clusters = yaml.safe_load(text)["static_resources"]["clusters"]
    thresholds = [each for cluster in clusters for each in cluster["circuit_breakers"]["thresholds"]]
    return [each[name] for each in thresholds for name in ("max_connections", "max_pending_requests", "max_requests")]


def test_what_is_scaled_is_there_and_has_no_number_of_its_own(rendered: Rendered) -> None:
    (workload,) = (*rendered.of_kind("Deployment"), *rendered.of_kind("LeaderWorkerSet"))
    scalers = [*rendered.of_kind("ScaledObject"), *rendered.of_kind("HorizontalPodAutoscaler")]
    for each in scalers:
        target = {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "name": workload["metadata"]["name"]}
        assert each["spec"]["scaleTargetRef"] == target
    assert ("replicas" in workload["spec"]) == (scalers == [])


def test_the_queue_that_scales_is_a_figure_of_the_server(repo: pathlib.Path) -> None:
    metric = yaml.safe_load((CHART / "values.yaml").read_text())["autoscaling"]["metric"]
    assert f"`{metric.removeprefix('jaxinfer:')}` | gauge" in (repo / "docs/metrics.md").read_text()
    query = Rendered({"autoscaling": {"kind": "keda"}}).one("ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]
    assert query == f'sum({metric}{{namespace="llm",pod=~"prod-jaxinfer-.*"}})'


def test_busy_devices_scale_by_a_figure_of_the_server(repo: pathlib.Path) -> None:
    assert "`device_busy_seconds{process,device}` | counter" in (repo / "docs/metrics.md").read_text()
    keda = Rendered({"autoscaling": {"kind": "keda", "busy": 95}}).one("ScaledObject")["spec"]["triggers"]
    assert [trigger["metadata"]["threshold"] for trigger in keda] == ["8", "95"]
    samples = 'rate(jaxinfer:device_busy_seconds_total{namespace="llm",pod=~"prod-jaxinfer-.*"}[2m])'
    assert keda[1]["metadata"]["query"] == f"100 * sum(avg by (pod) ({samples}))"
    hpa = Rendered({"autoscaling": {"kind": "hpa", "busy": 95}}).one("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert [each["pods"]["target"]["averageValue"] for each in hpa] == ["8", "95"]
    assert f'as: "{hpa[1]["pods"]["metric"]["name"]}"' in (repo / "docs/kubernetes.md").read_text()


def test_the_routed_paths_are_paths_of_the_server(repo: pathlib.Path) -> None:
    paths = yaml.safe_load((CHART / "values.yaml").read_text())["gateway"]["paths"]
    page = (repo / "docs/serving.md").read_text()
    assert [path for path in paths if f"`{path}" not in page] == []
    assert not any("/metrics".startswith(path) for path in paths)
