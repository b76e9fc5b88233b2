"""The Helm chart (docs/kubernetes.md): every form of it is what Kubernetes and the operators know, all its parts fit one
another, and all that it says to jaxinfer is jaxinfer's."""

from __future__ import annotations

import itertools
import math
import pathlib
import re
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

from jaxinfer.cli.serve import parse
from jaxinfer.serve.settings import ServeConfig, make_config
from tests.fleet.chart import (
    CHART,
    REPO,
    VERSIONS,
    Object,
    Rendered,
    Values,
    as_pod,
    check,
    container,
    merged,
    selected,
)

KEY = {"name": "alice", "sha256": "0" * 64, "scopes": ["infer", "observe"], "weight": 2}
ENTRIES = {"apiKeys": {"secret": "", "entries": [KEY]}}
GROUP = {"mode": "LeaderWorkerSet", "leaderWorkerSet": {"size": 4, "groupKey": {"secret": "group"}}}
ROUTE = {"gateway": {"enabled": True, "parents": [{"name": "inference", "namespace": "gateways"}], "grpc": True}}
PICKER = merged(ROUTE, {"gateway": {"endpointPicker": {"name": "picker"}, "hostnames": ["llm.example.com"]}})
TLS = {"tls": {"secret": "certificate"}}
SEEN = {"podMonitor": {"enabled": True, "keySecret": "prometheus", "labels": {"release": "prometheus"}}}
SEEN_BY_TLS = merged(SEEN, TLS, {"podMonitor": {"ca": "certificate", "serverName": "llm.example.com"}})

AXES: dict[str, dict[str, Values]] = {
    "mode": {"deployment": {}, "group": GROUP},
    "scaling": {kind: {"autoscaling": {"kind": kind}} for kind in ("none", "hpa", "keda")},
    "door": {"service": {}, "route": ROUTE, "picker": PICKER, "tls": SEEN_BY_TLS},
    "keys": {
        "secret": {},
        "entries": ENTRIES,
        "insecure": {"apiKeys": {"secret": ""}, "config": {"insecure": True}},
    },
}
OTHERS: dict[str, Values] = {
    "seen": SEEN,
    "no http": {"config": {"http_port": "off"}, "replicas": 0},
    "a short drain": merged(GROUP, {"config": {"drain_delay": 0, "drain_seconds": 0.5}}),
    "demo on a CPU": {
        "models": {"claim": ""},
        "config": {"model": "demo"},
        "resources": {"limits": {"nvidia.com/gpu": None}},
    },
    "open": {"networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}},
    "claims": {"programs": {"claim": "programs"}, "models": {"readOnly": False}, "image": {"pullSecrets": ["registry"]}},
    "a folder of the node": {"programs": {"hostPath": "/var/cache/jaxinfer"}, "image": {"digest": "sha256:" + "0" * 64}},
    "a balancer": {"service": {"type": "LoadBalancer", "annotations": {"example.com/internal": "true"}}},
    "IPv6, names": {"listen": "::", "nameOverride": "llama", "fullnameOverride": "llama-8b"},
    "placed": merged(
        GROUP,
        {
            "leaderWorkerSet": {"exclusiveTopology": "example.com/rack"},
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": {"nodeAffinity": {}},
            "priorityClassName": "serving",
            "runtimeClassName": "nvidia",
            "podLabels": {"llm-d.ai/role": "decode"},
            "podAnnotations": {"example.com/a": "b"},
            "extraEnv": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
        },
    ),
    "egress": {"networkPolicy": {"egress": [{"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "ports": [{"port": 443}]}]}},
    "large numbers": {"config": {"max_receive_bytes": 268435456, "engine": {"kv_cache_bytes": 10**12}}},
}


def _forms() -> dict[str, Values]:
    combined = itertools.product(*(axis.items() for axis in AXES.values()))
    every = {", ".join(name for name, _ in each): merged(*(values for _, values in each)) for each in combined}
    return every | OTHERS


FORMS = _forms()


@pytest.fixture(scope="module", params=FORMS)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return Rendered(FORMS[request.param])


@pytest.fixture(scope="module")
def plain() -> Rendered:
    return Rendered({})


@pytest.fixture(scope="module")
def group() -> Rendered:
    return Rendered(GROUP)


# ---- what Kubernetes and the operators know


def test_every_object_is_one_of_its_kind(rendered: Rendered) -> None:
    assert len(rendered.objects) >= 4
    check(rendered)


def test_there_are_all_kinds() -> None:
    kinds = {each["kind"] for values in FORMS.values() for each in Rendered(values).objects}
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


# ---- what helm refuses

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
    ({"autoscaling": {"kind": "vpa"}}, "autoscaling/kind"),
    ({"autoscaling": {"kind": "hpa", "minReplicas": 9}}, "autoscaling.minReplicas"),
    ({"autoscaling": {"metric": "rate(x)"}}, "autoscaling/metric"),
    ({"extraEnv": [{"value": "x"}]}, "extraEnv"),
]


@pytest.mark.parametrize(("values", "name"), REFUSED)
def test_a_wrong_value_is_refused_by_its_name(values: Values, name: str) -> None:
    with pytest.raises(helm_python.HelmError, match=re.escape(name)):
        Rendered(values)


def test_every_value_has_its_default_its_meaning_and_its_type() -> None:
    """Beside each line of values.yaml stands what it is; values.schema.json has the same names, none more but global."""
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


# ---- all that is referred to is there


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
        assert _found(rendered, selector) == doors
    for budget in rendered.of_kind("PodDisruptionBudget"):
        assert _found(rendered, budget["spec"]["selector"]["matchLabels"]) == dict.fromkeys(doors, True)


def _found(rendered: Rendered, selector: dict[str, str]) -> dict[str, bool]:
    return {name: selected(pod["metadata"]["labels"], selector) for name, pod in rendered.pods.items()}


def test_ports_are_those_of_the_settings(rendered: Rendered) -> None:
    settings = _settings(rendered)
    wanted = {"grpc": settings.grpc_port, "metrics": settings.metrics_port}
    wanted |= {"http": settings.http_port} if settings.http_port is not None else {}
    for name, pod in rendered.pods.items():
        ports = {each["name"]: each["containerPort"] for each in container(pod).get("ports", [])}
        assert ports == ({} if name == "follower" else wanted)
    served = {port["targetPort"]: port["port"] for each in rendered.of_kind("Service") for port in each["spec"]["ports"]}
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
        assert pool["spec"]["targetPorts"] == [{"number": _settings(rendered).http_port}]


def test_what_is_scaled_is_there_and_has_no_number_of_its_own(rendered: Rendered) -> None:
    (workload,) = (each for each in rendered.objects if each["kind"] in ("Deployment", "LeaderWorkerSet"))
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


def test_the_routed_paths_are_paths_of_the_server(repo: pathlib.Path) -> None:
    paths = yaml.safe_load((CHART / "values.yaml").read_text())["gateway"]["paths"]
    page = (repo / "docs/serving.md").read_text()
    assert [path for path in paths if f"`{path}" not in page] == []
    assert not any("/metrics".startswith(path) for path in paths)


# ---- who reaches whom


def test_only_those_who_are_named_reach_a_door(rendered: Rendered) -> None:
    settings = _settings(rendered)
    doors, pods = (_policy(rendered, name) for name in ("doors", "pods"))
    if doors is None or pods is None:
        assert rendered.of_kind("NetworkPolicy") == []
        return
    clients, monitoring = doors["spec"]["ingress"]
    of_clients = {settings.grpc_port, settings.http_port} - {None}
    assert {each["port"] for each in clients["ports"]} == of_clients
    assert [each["port"] for each in monitoring["ports"]] == [settings.metrics_port]
    assert set(doors["spec"]["podSelector"]["matchLabels"]) > set(pods["spec"]["podSelector"]["matchLabels"])
    assert pods["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "" not in (clients["from"], monitoring["from"])


def test_processes_of_a_group_reach_one_another_and_nobody_else_reaches_them(
    plain: Rendered, group: Rendered
) -> None:
    policy = _policy(group, "pods")
    assert policy is not None
    mine = [{"podSelector": {"matchLabels": policy["spec"]["podSelector"]["matchLabels"]}}]
    assert policy["spec"]["ingress"] == [{"from": mine}]
    assert policy["spec"]["egress"][0] == {"to": mine}
    assert _found(group, mine[0]["podSelector"]["matchLabels"]) == {"leader": True, "follower": True}
    alone = _policy(plain, "pods")
    assert alone is not None
    assert alone["spec"]["ingress"] == []
    assert [port["port"] for rule in alone["spec"]["egress"] for port in rule["ports"]] == [53, 53]


def _policy(rendered: Rendered, name: str) -> Object | None:
    found = [each for each in rendered.of_kind("NetworkPolicy") if each["metadata"]["name"].endswith(f"-{name}")]
    return found[0] if found else None


def test_a_pod_may_do_nothing_that_it_need_not(rendered: Rendered) -> None:
    """The rules of Pod Security "restricted", and a read-only root."""
    for pod in rendered.pods.values():
        spec, inner = pod["spec"], container(pod)
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == 10001
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert inner["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not spec["automountServiceAccountToken"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        kinds = {kind for each in spec["volumes"] for kind in each if kind != "name"}
        assert kinds <= {"configMap", "secret", "persistentVolumeClaim", "emptyDir", "hostPath"}
    assert not rendered.one("ServiceAccount")["automountServiceAccountToken"]


def test_the_folder_of_a_node_is_the_only_way_to_a_hostpath(rendered: Rendered) -> None:
    named = [name for name, values in FORMS.items() if values.get("programs", {}).get("hostPath")]
    assert named == ["a folder of the node"]
    assert ("hostPath" in str(rendered.pods)) == ("'path': '/var/cache/jaxinfer'" in str(rendered.pods))


def test_a_follower_has_neither_keys_nor_certificates() -> None:
    pods = Rendered(merged(GROUP, SEEN_BY_TLS)).pods
    kept = {name: {each["name"] for each in pod["spec"]["volumes"]} for name, pod in pods.items()}
    assert kept["leader"] - kept["follower"] == {"keys", "tls"}
    assert "group" in kept["follower"]


def test_keys_that_are_values_are_those_of_the_server(tmp_path: pathlib.Path) -> None:
    from_values = Rendered(ENTRIES).one("Secret")["stringData"]["keys.yaml"]
    assert yaml.safe_load(from_values) == [KEY]


# ---- what it says to jaxinfer is jaxinfer's


def _settings(rendered: Rendered) -> ServeConfig:
    return make_config(yaml.safe_load(rendered.settings))


def test_the_command_is_one_of_jaxinfer(rendered: Rendered, tmp_path: pathlib.Path) -> None:
    """Parsed by the program's own parser, with the file of settings: all names are its own, and can be served."""
    file = tmp_path / "production.yaml"
    file.write_text(rendered.settings)
    for name, pod in rendered.pods.items():
        environment = {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "0" if name == "leader" else "3"}
        environment |= {"LWS_LEADER_ADDRESS": "prod-0.prod.llm", "POD_IP": "fd00::17"}
        command, *arguments = expanded(container(pod)["args"], environment)
        assert command == "serve"
        (place,) = (each["mountPath"] for each in container(pod)["volumeMounts"] if each["name"] == "config")
        assert f"{place}/production.yaml" in arguments
        config = parse([str(file) if each.startswith("/") else each for each in arguments]).configuration
        assert config.num_processes == (1 if name == "server" else 4)
        assert config.process_id == (3 if name == "follower" else 0)
        if name != "server":
            where = {"leader": "fd00::17", "follower": "prod-0.prod.llm"}[name]
            assert config.coordinator_address == f"{where}:7654"


def expanded(arguments: list[str], environment: dict[str, str]) -> list[str]:
    """As Kubernetes does it: a variable that there is not stays as it is."""
    return [re.sub(r"\$\((\w+)\)", lambda found: environment.get(found[1], found[0]), each) for each in arguments]


def test_a_group_without_its_variables_is_refused(group: Rendered, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [each for each in container(group.pods["leader"])["args"] if each.startswith("--num")]
    with pytest.raises(SystemExit):
        parse(["demo", *expanded(arguments, {})])
    assert "$(LWS_GROUP_SIZE)" in capsys.readouterr().err


def test_every_file_that_is_named_is_mounted(rendered: Rendered) -> None:
    files = yaml.safe_load(rendered.settings)
    named = {name: files[name] for name in ("api_keys", "tls_cert", "tls_key", "group_key_file") if name in files}
    named["compilation_cache_dir"] = files["compilation_cache_dir"] + "/x"
    mounts = {name: [each["mountPath"] for each in container(pod)["volumeMounts"]] for name, pod in rendered.pods.items()}
    for name, path in named.items():
        assert str(pathlib.Path(path).parent) in mounts.get("leader", mounts.get("server", [])), name
    assert not {"api_keys"} & set(named) or rendered.settings.count("insecure") == 0


def test_the_settings_are_those_of_production(plain: Rendered, repo: pathlib.Path) -> None:
    """What configs/deployments/production.yaml has, but for TLS, which a Secret brings."""
    wanted = yaml.safe_load((repo / "configs/deployments/production.yaml").read_text())
    found = yaml.safe_load(plain.settings)
    tls = {"tls_cert", "tls_key"}
    assert set(wanted) - set(found) == tls
    assert {name: value for name, value in found.items() if value != wanted[name]} == {
        "api_keys": "/etc/jaxinfer/keys/keys.yaml"
    }
    assert tls < set(yaml.safe_load(Rendered(TLS).settings))


def test_large_numbers_stay_numbers() -> None:
    config = _settings(Rendered(OTHERS["large numbers"]))
    assert (config.max_receive_bytes, config.engine.kv_cache_bytes) == (268435456, 10**12)


# ---- drains


@pytest.mark.parametrize(
    ("delay", "seconds", "margin", "grace", "sleep"),
    [(10, 60, 10, 80, 70), (0, 30, 10, 40, 30), (2.5, 30.2, 5, 38, 33), (0, 0.1, 1, 2, 1), (120, 3600, 30, 3750, 3720)],
)
def test_a_pod_is_killed_after_its_server_has_given_up(
    delay: float, seconds: float, margin: float, grace: int, sleep: int
) -> None:
    drain = {"config": {"drain_delay": delay, "drain_seconds": seconds}, "drainMargin": margin}
    assert Rendered(drain).pods["server"]["spec"]["terminationGracePeriodSeconds"] == grace
    assert grace == math.ceil(delay + seconds + margin)
    pods = Rendered(merged(GROUP, drain)).pods
    assert {pod["spec"]["terminationGracePeriodSeconds"] for pod in pods.values()} == {grace}
    assert "lifecycle" not in container(pods["leader"])
    assert container(pods["follower"])["lifecycle"] == {"preStop": {"sleep": {"seconds": sleep}}}
    assert delay + seconds <= sleep < grace


def test_probes_ask_the_doors_process_alone(rendered: Rendered) -> None:
    scheme = "HTTPS" if "tls_cert" in rendered.settings else "HTTP"
    for name, pod in rendered.pods.items():
        probes = {kind: container(pod).get(f"{kind}Probe") for kind in ("startup", "readiness", "liveness")}
        if name == "follower":
            assert set(probes.values()) == {None}
            continue
        paths = {kind: probe["httpGet"]["path"] for kind, probe in probes.items()}
        assert paths == {"startup": "/health", "readiness": "/ready", "liveness": "/health"}
        assert {(each["httpGet"]["port"], each["httpGet"]["scheme"]) for each in probes.values()} == {("metrics", scheme)}
        assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] == 180


def test_readiness_is_gone_before_the_delay_is_over(plain: Rendered) -> None:
    probe = container(plain.pods["server"])["readinessProbe"]
    noticed = probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"]
    assert noticed < _settings(plain).drain_delay


def test_a_group_does_not_wait_for_itself(group: Rendered) -> None:
    """Its first pod is ready when the others are there, so these must not wait for that."""
    spec = group.one("LeaderWorkerSet")["spec"]
    assert spec["startupPolicy"] == "LeaderCreated"
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "None"
    assert spec["leaderWorkerTemplate"]["size"] == 4


def test_a_change_of_the_settings_makes_new_pods(plain: Rendered) -> None:
    other = Rendered({"config": {"log_level": "debug"}})
    first, second = (each.pods["server"]["metadata"]["annotations"]["checksum/config"] for each in (plain, other))
    assert first != second


def test_the_notes_say_what_is_open() -> None:
    said = Rendered({}).notes
    assert "http://prod-jaxinfer.llm:8000/v1" in said
    assert "without TLS" in said
    assert "no API keys" not in said
    assert "no API keys" in Rendered(FORMS["deployment, none, service, insecure"]).notes
    assert "no NetworkPolicies" in Rendered(OTHERS["open"]).notes
    assert "without TLS" not in Rendered(TLS).notes


def test_the_image_is_that_of_the_dockerfile(plain: Rendered) -> None:
    text = (REPO / "Dockerfile").read_text()
    pod = plain.pods["server"]
    assert f"\nUSER {pod['spec']['securityContext']['runAsUser']}\n" in text
    assert f"--build-arg EXTRA={container(pod)['image'].removeprefix('jaxinfer:')} " in text
    written = {each["mountPath"] for each in container(pod)["volumeMounts"] if not each.get("readOnly")}
    assert written == {"/var/cache/jaxinfer", "/home/jaxinfer", "/tmp", "/dev/shm"}
    assert "\nVOLUME /var/cache/jaxinfer\n" in text
    assert "\nWORKDIR /home/jaxinfer\n" in text
    as_pod(pod)
