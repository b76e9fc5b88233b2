"""Tests of server settings from files and flags."""

import math
import pathlib
import typing

import pytest

from jaxinfer.cli.serve import parse
from jaxinfer.config import EngineConfig
from jaxinfer.serve.settings import QUEUE, TIMES, ServeConfig, ServeConfigError, make_config, read_settings


def test_later_layers_go_before_earlier_ones_field_by_field():
    file = {"model": "demo", "http_port": 8000, "engine": {"max_num_seqs": 4, "page_size": 16}, "limits": {"n": 3}}
    config = make_config(file, {"http_port": 9000, "engine": {"max_num_seqs": 8}})
    assert (config.http_port, config.limits.n) == (9000, 3)
    assert config.engine == EngineConfig(max_num_seqs=8, page_size=16, **QUEUE)
    assert make_config({"model": "demo"}) == ServeConfig(model="demo")


def test_lists_become_what_the_field_is():
    config = make_config({"model": "demo", "engine": {"prefill_sizes": [16, 64]}})
    assert config.engine.prefill_sizes == (16, 64)


def test_settings_may_have_the_names_and_places_of_other_engines():
    config = make_config(
        {
            "model": "demo",
            "port": 8001,
            "gpu-memory-utilization": 0.5,
            "max_num_seqs": 3,
            "limit_n": 2,
            "trust-remote-code": True,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
            "engine": {"block_size": 16, "enable_chunked_prefill": True, "max_num_seqs": 3},
        },
        {"engine": {"page_size": 32}},
    )
    engine = config.engine
    assert (config.http_port, config.limits.n) == (8001, 2)
    assert (engine.memory_utilization, engine.max_num_seqs, engine.page_size) == (0.5, 3, 32)
    assert (engine.speculative, engine.num_speculative_tokens) == ("ngram", 2)


GROUP = {"model": "demo", "num_processes": 2, "coordinator_address": "[::1]:7654", "group_key_file": "key"}

REFUSED = [
    ({}, "model is not set: name one"),
    ({"model": "demo", "port": 1, "http_port": 2}, "port and http_port are one setting"),
    ({"model": "demo", "max_num_seqs": 1, "engine": {"max_num_seqs": 2}}, "max_num_seqs = 2 and 1"),
    ({"model": "demo", "engine": {"enable_chunked_prefill": False}}, "enable_chunked_prefill = False"),
    ({"model": "demo", "http_prot": 1}, "http_prot is not a setting: did you mean http_port?"),
    ({"model": "demo", "engine": {"http_port": 1}}, "engine.http_port is not a setting: did you mean http_port?"),
    ({"model": "demo", "api_key": "x"}, "api_key is not a setting: hashed keys stand in the file that api_keys names"),
    ({"model": "demo", "xyzzy": 1}, "xyzzy is not a setting: docs/serving.md and docs/settings.md list them"),
    ({"model": "demo", "dtype": "int3"}, "dtype = 'int3' must be one of auto, float32"),
    ({"model": "demo", "engine": {"page_size": 3}}, "engine.page_size = 3 must be a power of two"),
    ({"model": "demo", "engine": {"scheduling_policy": "lifo"}}, "engine.scheduling_policy = lifo must be one of fcfs"),
    ({"model": "demo", "prefix_cache_sharing": "none"}, "prefix_cache_sharing = 'none' must be one of tenant, all"),
    ({"model": "demo", "tool_call_parser": "x"}, "tool_call_parser = 'x' must be one of auto, off, deepseek_v3,"),
    ({"model": "demo", "reasoning_parser": "hermes"}, "reasoning_parser = 'hermes' must be one of auto, off,"),
    ({"model": "demo", "reasoning_field": "thought"}, "reasoning_field = 'thought' must be one of both, reasoning,"),
    ({"model": "demo", "engine": {"pages": 1}}, "engine.pages is not a setting"),
    ({"model": "demo", "engine": 5}, "engine = 5"),
    ({"model": "demo", "http_port": "abc"}, "http_port = 'abc'"),
    ({"model": "demo", "http_port": 65536}, "http_port = 65536 must be a port"),
    ({"model": "demo", "grpc_port": -1}, "grpc_port = -1 must be a port"),
    ({"model": "demo", "drain_seconds": 0}, "drain_seconds = 0"),
    ({"model": "demo", "step_timeout": -1}, "step_timeout = -1"),
    ({"model": "demo", "engine": {"max_num_seqs": float("inf")}}, "engine.max_num_seqs = inf"),
    ({"model": "demo", "limits": {"n": 0}}, "limits.n = 0 must be at least 1"),
    ({"model": "demo", "log_format": "xml"}, "log_format = 'xml' must be one of text, json"),
    ({"model": "demo", "tls_cert": "a.pem"}, "tls_cert = 'a.pem' and tls_key = None belong together"),
    ({"model": "demo", "tls_client_ca": "a.pem"}, "tls_client_ca = 'a.pem' needs tls_cert"),
    ({"model": "demo", "host": "0.0.0.0"}, "host = '0.0.0.0' is not loopback"),
    ({"model": "demo", "host": "example"}, "host = 'example' is not loopback"),
    ({"model": "demo", "control_host": "::"}, "control_host = '::' is not loopback"),
    ({"model": "demo", "metrics_host": "0.0.0.0"}, "metrics_host = '0.0.0.0' is not loopback"),
    ({"model": "demo", "metrics_port": 65536}, "metrics_port = 65536 must be a port"),
    ({"model": "demo", "num_processes": 0}, "num_processes = 0 must be at least 1"),
    ({"model": "demo", "process_id": 1}, "process_id = 1 must be from 0 to 0"),
    ({"model": "demo", "num_processes": 2}, "coordinator_address = None must be set with num_processes = 2"),
    ({**GROUP, "group_key_file": None}, "group_key_file = None must be set with num_processes = 2"),
    ({**GROUP, "coordinator_address": "7654"}, "coordinator_address = '7654' must be HOST:PORT"),
    ({**GROUP, "coordinator_address": "host:0"}, "coordinator_address = 'host:0' must be HOST:PORT"),
    ({**GROUP, "group_timeout": 0}, "group_timeout = 0"),
    ({"model": "demo", "lora_root": "/"}, "lora_root = '/' needs enable_lora"),
    ({"model": "demo", "lora_modules": ["a=b"]}, "lora_modules = ('a=b',) needs enable_lora"),
    ({"model": "demo", "weights_root": "/no"}, "weights_root = '/no' must be a folder"),
    ({"model": "demo", "lora_root": "/no", "engine": {"enable_lora": True}}, "lora_root = '/no' must be a folder"),
    ({"model": "demo", "allowed_media_domains": ["http://a.b"]}, "allowed_media_domains = 'http://a.b' must be a host"),
    ({"model": "demo", "allowed_media_domains": ["*"]}, "allowed_media_domains = '*' must be a host"),
    ({"model": "demo", "limits": {"image_pixels": 10**9}}, "limits.image_pixels = 1000000000 must be at most"),
    ({"model": "demo", "limits": {"image_bytes": 0}}, "limits.image_bytes = 0 must be at least 1"),
    ({**GROUP, "engine": {"enable_dp_attention": True}}, "engine.enable_dp_attention = True and num_processes = 2"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_cannot_be_served_is_refused_by_name(settings, message):
    with pytest.raises(ServeConfigError) as refusal:
        make_config(settings)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "port"),
    [("", 8000), ("http_port: off", None), ("http_port: 'off'", None), ("http_port: null", None), ("http_port: 0", 0)],
)
def test_http_is_on_unless_it_is_off(tmp_path, text, port):
    """HTTP is on unless the port is off, which YAML parses as false; it must not become port 0."""
    (tmp_path / "config.yaml").write_text(f"model: demo\n{text}\n")
    assert make_config(read_settings(tmp_path / "config.yaml")).http_port == port


@pytest.mark.parametrize(("text", "parser"), [("off", "off"), ("auto", "auto"), ("mistral", "mistral")])
def test_parsers_are_off_as_yaml_writes_it(tmp_path, text, parser):
    (tmp_path / "config.yaml").write_text(f"model: demo\ntool_call_parser: {text}\nreasoning_parser: {text}\n")
    config = make_config(read_settings(tmp_path / "config.yaml"))
    assert (config.tool_call_parser, config.reasoning_parser) == (parser, parser)


def test_http_is_off_by_a_flag():
    for given, port in ((["--http-port", "off"], None), (["--http-port", "0"], 0), ([], 8000)):
        assert parse(["--model", "demo", *given]).configuration.http_port == port
    with pytest.raises(SystemExit):
        parse(["--model", "demo", "--http-port", "on"])


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, 2e6 + 1])
def test_the_delay_of_a_drain_may_be_nothing_but_not_for_ever(seconds):
    assert make_config({"model": "demo", "drain_delay": 0}).drain_delay == 0.0
    with pytest.raises(ServeConfigError, match=r"^drain_delay = .* must be a number of seconds from 0 to 2000000"):
        make_config({"model": "demo", "drain_delay": seconds})


def test_times_are_all_that_there_are():
    hints = typing.get_type_hints(ServeConfig)
    times = {name for name, hint in hints.items() if hint in (float, float | None)}
    assert times == {*TIMES, "drain_delay"}  # the only one that may be 0


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.0, 2e6 + 1, "inf", "nan"])
def test_no_time_is_infinite(name, value):
    """Infinite times are rejected: gRPC's keepalive in milliseconds would not be a number."""
    with pytest.raises(ServeConfigError, match=f"^{name} = .* must be a number of seconds above 0 and at most 2000000"):
        make_config({"model": "demo", name: value})
    with pytest.raises(ServeConfigError, match=f"^{name} = "):
        make_config({"model": "demo"}, {name: float(value)})


def test_a_process_of_a_group_is_what_it_is_told():
    assert make_config({**GROUP, "process_id": 1}).process_id == 1


@pytest.mark.parametrize("name", ["http_port", "metrics_port", "control_port"])
def test_each_door_has_a_port_of_its_own(name):
    with pytest.raises(ServeConfigError, match=f"^{name} = 50051 is grpc_port already"):
        make_config({"model": "demo", name: 50051})
    assert make_config({"model": "demo", "grpc_port": 0, name: 0})
    assert make_config({"model": "demo", "metrics_port": 50051, "metrics_host": "127.0.0.2"})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_keys(host):
    assert make_config({"model": "demo", "host": host}).host == host


def test_an_open_address_is_allowed_where_someone_guards_it():
    assert make_config({"model": "demo", "host": "0.0.0.0", "api_keys": "keys.yaml"}).api_keys == "keys.yaml"
    assert make_config({"model": "demo", "host": "0.0.0.0", "insecure": True}).insecure


@pytest.mark.parametrize(
    "content", ["- a\n- b", "a: [", "\xff\xfe", "!!python/object/apply:os.system [ls]", "x: 1\n" * 300_000]
)
def test_a_bad_file_is_refused(tmp_path: pathlib.Path, content):
    path = tmp_path / "settings.yaml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ServeConfigError, match=r"settings\.yaml"):
        read_settings(path)
    with pytest.raises(ServeConfigError, match="cannot be read"):
        read_settings(tmp_path / "none.yaml")


def test_the_deployments_of_the_repository_are_valid(repo):
    files = sorted((repo / "configs" / "deployments").glob("*.yaml"))
    assert len(files) >= 2
    for path in files:
        make_config(read_settings(path))


def test_flags_go_before_the_file_and_the_model_needs_none(tmp_path, capsys):
    path = tmp_path / "settings.yaml"
    path.write_text("model: demo\nhttp_port: 1\nengine:\n  page_size: 32\n")
    config = parse(["--config", str(path), "--port", "2", "-tp", "2"]).configuration
    assert (config.model, config.http_port, config.engine.page_size) == ("demo", 2, 32)
    assert config.engine.tensor_parallel_size == 2
    assert parse(["demo-draft", "--config", str(path)]).configuration.model == "demo-draft"
    with pytest.raises(SystemExit):
        parse(["demo", "--model", "demo-draft"])
    assert "name one" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["inf", "nan", "0", "-1"])
def test_a_flag_that_cannot_be_ends_the_command(value, capsys):
    with pytest.raises(SystemExit) as left:
        parse(["demo", f"--drain-seconds={value}"])
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("error: drain_seconds = ")


def test_vllm_grpc_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_config({"model": "demo", "vllm_grpc": True}).vllm_grpc
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not make_config({"model": "demo"}).vllm_grpc
    with pytest.raises(ServeConfigError, match=r"vllm_grpc = True needs smg_grpc_proto: pip install .jaxinfer.routing"):
        make_config({"model": "demo", "vllm_grpc": True})
