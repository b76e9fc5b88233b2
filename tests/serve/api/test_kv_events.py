"""Tests of rejected KV event settings and their errors."""

import pytest

from jaxinfer.serve.api import kv_events
from jaxinfer.serve.settings import ServeConfigError, make_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_events_format": "json"}, "kv_events_format = 'json' must be one of map, array"),
        ({"kv_events_endpoint": "tcp://0.0.0.0:5557"}, "kv_events_endpoint = 'tcp://0.0.0.0:5557' is not loopback"),
        ({"kv_events_endpoint": "tcp://*:5557"}, "set kv_events_insecure where the network is trusted"),
        ({"kv_events_endpoint": "tcp://[::]:5557"}, "is not loopback"),
        ({"kv_events_endpoint": "udp://127.0.0.1:1"}, "must be tcp://HOST:PORT or ipc:///PATH"),
        ({"kv_events_endpoint": "tcp://127.0.0.1:65536"}, "must be tcp://HOST:PORT"),
        ({"kv_events_endpoint": "127.0.0.1:5557"}, "must be tcp://HOST:PORT"),
        ({"kv_events_replay_endpoint": "tcp://10.0.0.1:5558"}, "kv_events_replay_endpoint = .* is not loopback"),
        ({"kv_events": True, "engine": {"enable_prefix_caching": False}}, "needs engine.enable_prefix_caching"),
        ({"kv_events": True, "insecure": True, "kv_events_endpoint": "tcp://*:1"}, "kv_events_endpoint .* no"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes, message):
    with pytest.raises(ServeConfigError, match=message.replace("*:", r"\*:").replace("[::]", r"\[::\]")):
        make_config({"model": "demo", **changes})


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:0", "tcp://localhost:5557", "tcp://[::1]:5557", "ipc:///run/x.sock", "off", False]
)
def test_what_nobody_else_reaches_needs_no_leave(endpoint):
    config = make_config({"model": "demo", "kv_events": True, "kv_events_endpoint": endpoint})
    assert config.kv_events_endpoint == (endpoint or "off")
    make_config({"model": "demo", "kv_events_endpoint": "tcp://*:5557", "kv_events_insecure": True})


def test_without_its_packages_it_is_refused_with_the_name_of_the_extra(monkeypatch):
    monkeypatch.setattr(kv_events, "PACKAGES", ("zmq", "nowhere_to_be_found"))
    with pytest.raises(ServeConfigError, match=r"needs nowhere_to_be_found: pip install 'jaxinfer\[routing\]'"):
        make_config({"model": "demo", "kv_events": True})
