"""Tests of the Helm chart (docs/kubernetes.md): network access, pod security, termination, and valid jaxinfer settings
and commands."""

from __future__ import annotations

import math
import pathlib
import re
import shlex

import helm_python
import pytest
import yaml

from jaxinfer.cli.serve import parse
from jaxinfer.serve.api.auth import read_keys
from jaxinfer.version import __version__
from tests.fleet.chart import (
    CHART,
    REPO,
    Object,
    Rendered,
    check,
    container,
    expanded,
    found_by,
    merged,
    selected,
    settings_of,
)
from tests.fleet.forms import ENTRIES, ENVOY, FORMS, GROUP, KEY, OTHERS, SEEN_BY_TLS, TLS, form


@pytest.fixture(scope="module", params=FORMS)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return form(request.param)


@pytest.fixture(scope="module")
def plain() -> Rendered:
    return Rendered({})


@pytest.fixture(scope="module")
def group() -> Rendered:
    return Rendered(GROUP)


# ---- network access


def test_only_those_who_are_named_reach_a_door(rendered: Rendered) -> None:
    """Each port has one rule, and each rule lists peers, because a rule without peers admits all."""
    settings, doors = settings_of(rendered), _policy(rendered, "doors")
    if doors is None:
        assert rendered.of_kind("NetworkPolicy") == []
        return
    rules = [(each["from"], {port["port"] for port in each["ports"]}) for each in doors["spec"]["ingress"]]
    wanted = [{settings.grpc_port, settings.http_port} - {None}, {settings.metrics_port}]
    if settings.kv_events:
        ends = (settings.kv_events_endpoint, settings.kv_events_replay_endpoint or "")
        wanted.append({int(each.rpartition(":")[2]) for each in ends})
    assert [ports for _, ports in rules] == wanted
    assert all(peers for peers, _ in rules)
    assert found_by(rendered, doors["spec"]["podSelector"]["matchLabels"]) == {
        name: name != "follower" for name in rendered.pods
    }


def test_clients_reach_the_proxy_and_it_alone_the_pods() -> None:
    clients = [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]
    rendered = Rendered(merged(ENVOY, {"networkPolicy": {"clients": clients}}))
    doors, proxy = _policy(rendered, "doors"), rendered.one("NetworkPolicy", proxy=True)
    assert doors is not None
    (peer,) = doors["spec"]["ingress"][0]["from"]
    labels = rendered.one("Deployment", proxy=True)["spec"]["template"]["metadata"]["labels"]
    assert selected(labels, peer["podSelector"]["matchLabels"])
    assert proxy["spec"]["ingress"][0]["from"] == clients
    assert {each["port"] for each in proxy["spec"]["ingress"][0]["ports"]} == {8080, 50050}
    (to,) = proxy["spec"]["egress"][0]["to"]
    assert found_by(rendered, to["podSelector"]["matchLabels"]) == {"server": True}
    assert {each["port"] for each in proxy["spec"]["egress"][0]["ports"]} == {8000, 50051}


def test_processes_of_a_group_reach_one_another_and_nobody_else_reaches_them(plain: Rendered, group: Rendered) -> None:
    policy = _policy(group, "pods")
    assert policy is not None
    mine = [{"podSelector": {"matchLabels": policy["spec"]["podSelector"]["matchLabels"]}}]
    assert policy["spec"]["ingress"] == [{"from": mine}]
    assert policy["spec"]["egress"][0] == {"to": mine}
    assert found_by(group, mine[0]["podSelector"]["matchLabels"]) == {"leader": True, "follower": True}
    alone = _policy(plain, "pods")
    assert alone is not None
    assert alone["spec"]["ingress"] == []
    assert [port["port"] for rule in alone["spec"]["egress"] for port in rule["ports"]] == [53, 53]


def _policy(rendered: Rendered, name: str) -> Object | None:
    found = [each for each in rendered.of_kind("NetworkPolicy") if each["metadata"]["name"].endswith(f"-{name}")]
    return found[0] if found else None


def test_a_pod_may_do_nothing_that_it_need_not(rendered: Rendered) -> None:
    """Pods follow Pod Security "restricted" and have a read-only root."""
    proxies = [each["spec"]["template"] for each in rendered.of_kind("Deployment", proxy=True)]
    for pod in (*rendered.pods.values(), *proxies):
        spec, inner = pod["spec"], container(pod)
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"]
        assert spec["securityContext"]["runAsUser"] == (101 if pod in proxies else 10001)
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


def test_nothing_but_the_value_for_it_mounts_a_folder_of_the_node() -> None:
    mounting = {name for name in FORMS if "'hostPath'" in str(form(name).pods)}
    assert mounting == {"a folder of the node"}


def test_a_follower_has_neither_keys_nor_certificates() -> None:
    pods = Rendered(merged(GROUP, SEEN_BY_TLS)).pods
    kept = {name: {each["name"] for each in pod["spec"]["volumes"]} for name, pod in pods.items()}
    assert kept["leader"] - kept["follower"] == {"keys", "tls"}
    assert "group" in kept["follower"]


def test_keys_that_are_values_can_be_read_by_the_server(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(Rendered(ENTRIES).one("Secret")["stringData"]["keys.yaml"])
    assert yaml.safe_load(file.read_text()) == [KEY]
    (key,) = read_keys(file)
    assert (key.caller.name, key.caller.scopes) == ("alice", {"infer", "observe"})


# ---- commands and settings of jaxinfer


def test_the_command_is_one_of_jaxinfer(rendered: Rendered, tmp_path: pathlib.Path) -> None:
    """jaxinfer's own parser accepts the command and the settings file, and they are servable."""
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


def test_a_group_without_its_variables_is_refused(group: Rendered, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [each for each in container(group.pods["leader"])["args"] if each.startswith("--num")]
    with pytest.raises(SystemExit):
        parse(["demo", *expanded(arguments, {})])
    assert "$(LWS_GROUP_SIZE)" in capsys.readouterr().err


def test_every_file_that_is_named_is_mounted(rendered: Rendered) -> None:
    files = yaml.safe_load(rendered.settings)
    named = {name: files[name] for name in ("api_keys", "tls_cert", "tls_key", "group_key_file") if name in files}
    named["compilation_cache_dir"] = files["compilation_cache_dir"] + "/x"
    mounts = {
        name: [each["mountPath"] for each in container(pod)["volumeMounts"]] for name, pod in rendered.pods.items()
    }
    for name, path in named.items():
        assert str(pathlib.Path(path).parent) in mounts.get("leader", mounts.get("server", [])), name


def test_the_settings_are_those_of_production(plain: Rendered, repo: pathlib.Path) -> None:
    """The settings equal configs/deployments/production.yaml, except for TLS, which a Secret provides."""
    wanted = yaml.safe_load((repo / "configs/deployments/production.yaml").read_text())
    found = yaml.safe_load(plain.settings)
    tls = {"tls_cert", "tls_key"}
    assert set(wanted) - set(found) == tls
    assert {name: value for name, value in found.items() if value != wanted[name]} == {
        "api_keys": "/etc/jaxinfer/keys/keys.yaml"
    }
    assert tls < set(yaml.safe_load(Rendered(TLS).settings))


def test_large_numbers_stay_numbers() -> None:
    config = settings_of(Rendered(OTHERS["large numbers"]))
    assert (config.max_receive_bytes, config.engine.kv_cache_bytes) == (268435456, 10**12)


# ---- draining


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
        assert {(each["httpGet"]["port"], each["httpGet"]["scheme"]) for each in probes.values()} == {
            ("metrics", scheme)
        }
        assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] == 180


def test_readiness_is_gone_before_the_delay_is_over(plain: Rendered) -> None:
    probe = container(plain.pods["server"])["readinessProbe"]
    noticed = probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"]
    assert noticed < settings_of(plain).drain_delay


def test_a_group_does_not_wait_for_itself(group: Rendered) -> None:
    """The leader is ready only when the followers run, so they must not wait for it."""
    spec = group.one("LeaderWorkerSet")["spec"]
    assert spec["startupPolicy"] == "LeaderCreated"
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "None"
    assert spec["leaderWorkerTemplate"]["size"] == 4


def test_a_proxy_that_is_told_to_stop_goes_on_for_a_while() -> None:
    pod = Rendered(merged(ENVOY, {"envoy": {"drainSeconds": 90}})).one("Deployment", proxy=True)["spec"]["template"]
    assert container(pod)["lifecycle"] == {"preStop": {"sleep": {"seconds": 90}}}
    assert pod["spec"]["terminationGracePeriodSeconds"] == 100


def test_a_change_of_the_settings_makes_new_pods(plain: Rendered) -> None:
    other = Rendered({"config": {"log_level": "debug"}})
    first, second = (each.pods["server"]["metadata"]["annotations"]["checksum/config"] for each in (plain, other))
    assert first != second


def test_the_notes_say_what_is_open() -> None:
    said = Rendered({}).notes
    assert "http://prod-jaxinfer.llm:8000/v1" in said
    assert "without TLS" in said
    assert "no API keys" not in said
    assert "no API keys" in Rendered(OTHERS["insecure"]).notes
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


def test_the_commands_of_the_pages_install_what_they_say(repo: pathlib.Path) -> None:
    """Commands in the docs, except helm itself: their values are parsed as by helm, and rendered."""
    text = "".join((repo / "docs" / page).read_text() for page in ("kubernetes.md", "deploying.md"))
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.startswith("helm ")]
    assert len(lines) >= 4
    for line in lines:
        words = shlex.split(line)
        assert (repo / words[5]) == CHART
        given = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
        check(Rendered(merged(*map(helm_python.parse_set_string, given))))


def test_the_first_look_needs_neither_a_checkpoint_nor_a_gpu(repo: pathlib.Path) -> None:
    page = (repo / "docs/kubernetes.md").read_text()
    told = [shlex.split(each)[1] for each in re.findall(r"`(--set [^`]*)`", page)]
    rendered = Rendered(merged(*map(helm_python.parse_set_string, told)))
    check(rendered)
    pod = rendered.pods["server"]
    assert "models" not in {each["name"] for each in pod["spec"]["volumes"]}
    assert container(pod)["image"] == "jaxinfer:latest"
    assert "nvidia.com/gpu" not in container(pod)["resources"]["limits"]


def test_the_chart_is_of_this_version() -> None:
    with helm_python.Chart.load(CHART) as chart:
        assert chart.metadata["appVersion"] == __version__
