"""Tests of application arguments: settings of `jaxinfer serve`, and of replicas."""

import pathlib

import pytest

from jaxinfer.integrations.replicas.settings import ELSEWHERE, POLICY, deployment_options, parse
from jaxinfer.serve.settings import ServeConfig, ServeConfigError, make_config


def test_settings_are_those_of_the_command_by_their_flags_names() -> None:
    config, _ = parse(
        {"model": "demo", "max_num_seqs": "4", "enable_lora": "true", "limit_n": "3", "check_finite": "1"}
    )
    assert (config.model, config.check_finite, config.limits.n) == ("demo", True, 3)
    assert (config.engine.max_num_seqs, config.engine.enable_lora) == (4, True)
    assert config.http_port is None


def test_settings_are_those_of_a_file_and_arguments_go_before_them(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: demo\nengine: {max_num_seqs: 3, page_size: 16}\nlimits: {n: 2}\n")
    config, _ = parse(
        {"config": str(file), "max_num_seqs": 5, "engine": {"max_model_len": 64}, "limits": {"values": 99}}
    )
    engine = config.engine
    assert (engine.max_num_seqs, engine.page_size, engine.max_model_len) == (5, 16, 64)
    assert (config.limits.n, config.limits.values) == (2, 99)


def test_without_a_word_they_are_the_commands_own() -> None:
    config, _ = parse({"model": "demo"})
    assert config == make_config({"model": "demo", "http_port": "off"})


@pytest.mark.parametrize("value", ["[16, 64]", [16, 64]])
def test_lists_may_come_as_texts(value: object) -> None:
    config, _ = parse({"model": "demo", "prefill_sizes": value})
    assert config.engine.prefill_sizes == (16, 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "model is not set"),
        ({"model": "demo", "max_num_seqs": "many"}, "engine.max_num_seqs = 'many'"),
        ({"model": "demo", "max_num_seqs": 0}, "max_num_seqs"),
        ({"model": "demo", "limit_n": 0}, "limits.n = 0 must be at least 1"),
        ({"model": "demo", "max_seqs": 4}, "max_seqs is not a setting"),
        ({"model": "demo", "num_replica": 4}, "num_replica is not a setting: did you mean num_replicas?"),
        ({"model": "demo", "prefill_sizes": "[1"}, r"prefill_sizes = '\[1' is no YAML"),
        ({"model": "demo", "engine": 3, "max_num_seqs": 4}, "engine = 3 must hold settings by name"),
        ({"model": "demo", "num_replicas": "two"}, "num_replicas = 'two'"),
        ({"model": "demo", "num_replicas": 0}, "num_replicas = 0 must be at least 1"),
        ({"model": "demo", "min_replicas": 3, "max_replicas": 2}, "min_replicas = 3 is more than max_replicas = 2"),
        ({"model": "demo", "target_waiting_requests": 0}, "target_waiting_requests = 0.0 must be a number above 0"),
        ({"model": "demo", "upscale_delay_s": ".nan"}, "upscale_delay_s = '.nan'"),
        ({"model": "demo", "look_back_period_s": float("inf")}, "look_back_period_s = inf"),
        ({"model": "demo", "num_gpus": -1}, "num_gpus = -1.0 must be a number from 0"),
        ({"model": "demo", "num_cpus": 0}, "num_cpus = 0.0 and num_gpus must not both be 0"),
        (
            {"model": "demo", "placement_group_strategy": "NEAR"},
            "placement_group_strategy = 'NEAR' must be",
        ),
        ({"model": "demo", "deployment_name": "a#b"}, "deployment_name = 'a#b'"),
        ({"model": "demo", "num_processes": 2, "num_cpus": 0}, "num_cpus = 0.0"),
        ({"config": "/nowhere.yaml"}, "--config /nowhere.yaml cannot be read"),
    ],
)
def test_a_refusal_names_the_setting_and_the_value(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ServeConfigError, match=message):
        parse(arguments)


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_what_means_nothing_here_is_refused(name: str, tmp_path: pathlib.Path) -> None:
    assert name in ServeConfig.__dataclass_fields__
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: demo\n{name}: 5\n")
    for arguments in ({"model": "demo", name: "5"}, {"config": str(file)}):
        with pytest.raises(ServeConfigError, match=f"{name} = '?5'?: "):
            parse(arguments)


def options(**arguments: object) -> dict[str, object]:
    return deployment_options(*parse({"model": "demo", **arguments}))


def test_a_replica_is_an_actor_and_may_drain() -> None:
    made = options(num_replicas=3, num_gpus=1, drain_delay=4, drain_seconds=60)
    assert made["num_replicas"] == 3
    assert made["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": 1.0}
    assert (made["graceful_shutdown_wait_loop_s"], made["graceful_shutdown_timeout_s"]) == (4.0, 74.0)
    assert "placement_group_bundles" not in made
    assert "autoscaling_config" not in made
    assert options()["graceful_shutdown_wait_loop_s"] > 0


def test_a_group_has_a_bundle_for_each_process(tmp_path: pathlib.Path) -> None:
    """A group has a bundle per process; its key and addresses need no settings, because Ray provides them."""
    made = options(num_processes=2, num_gpus=8, placement_group_strategy="STRICT_SPREAD")
    assert made["placement_group_bundles"] == [{"CPU": 1.0, "GPU": 8.0}] * 2
    assert made["placement_group_strategy"] == "STRICT_SPREAD"
    assert options(num_processes=2)["placement_group_bundles"] == [{"CPU": 1.0}] * 2


def test_a_key_that_all_hosts_have_may_be_named() -> None:
    assert parse({"model": "demo", "num_processes": 2})[0].group_key_file is None
    assert parse({"model": "demo", "num_processes": 2, "group_key_file": "/key"})[0].group_key_file == "/key"
    assert parse({"model": "demo", "num_processes": 2})[0].coordinator_address is None


def test_replicas_that_follow_the_load_have_our_policy() -> None:
    made = options(min_replicas=2, max_replicas=5, target_ongoing_requests=7, target_waiting_requests=3)
    assert "num_replicas" not in made
    found = made["autoscaling_config"]
    assert isinstance(found, dict)
    assert (found["min_replicas"], found["max_replicas"]) == (2, 5)
    assert found["policy"]["policy_function"] == POLICY
    assert found["policy"]["policy_kwargs"] == {"target_ongoing_requests": 7.0, "target_waiting_requests": 3.0}
