"""Settings of KV events. No jax."""

from __future__ import annotations

import dataclasses
import importlib.util
import ipaddress
import re
from typing import Annotated, Any

import pydantic

FORMATS = ("map", "array")
OFF = "off"
PACKAGES = ("zmq",)
_ENDPOINT = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.]+\]|[^:/\[\]]+):(?P<port>\*|[0-9]{1,5})|ipc://(?P<path>/.+)")


def _or_off(value: Any) -> Any:
    return OFF if value is False else value  # YAML reads ``off`` as false


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvEventsConfig:
    """KV events: cached pages, reported as they come and go (docs/kv_events.md).

    Attributes:
        kv_events: publish events for routers: over ZMQ, and by SubscribeKvEvents of vllm.grpc.engine.
        kv_events_endpoint: address of the ZMQ publisher, tcp://HOST:PORT (0: a free port) or ipc:///PATH; off: none.
        kv_events_replay_endpoint: address at which subscribers request missed events (default: none).
        kv_events_topic: topic of the messages (default: kv@HOSTNAME@MODEL).
        kv_events_format: "map": events are maps, as in vLLM; "array": as in older versions of vLLM.
        kv_events_insecure: allow ZMQ addresses beyond loopback; any client there reads all prompts, without a key.
    """

    kv_events: bool = False
    kv_events_endpoint: Annotated[str, pydantic.BeforeValidator(_or_off)] = "tcp://127.0.0.1:5557"
    kv_events_replay_endpoint: str | None = None
    kv_events_topic: str | None = None
    kv_events_format: str = FORMATS[0]
    kv_events_insecure: bool = False


def refusal(config: KvEventsConfig, caching: bool) -> tuple[str, object, str] | None:
    """Return the first setting that cannot be served: its name, its value, and the reason. None: all are valid.

    Args:
        caching: whether the engine keeps cached pages.
    """
    if config.kv_events_format not in FORMATS:
        return "kv_events_format", config.kv_events_format, f"must be one of {', '.join(FORMATS)}"
    for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        if (endpoint := getattr(config, name)) not in (None, OFF) and (what := _wrong(endpoint, config)):
            return name, endpoint, what
    if not config.kv_events:
        return None
    if not caching:
        return "kv_events", True, "needs engine.enable_prefix_caching: without it no page is cached"
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        return "kv_events", True, f"needs {', '.join(missing)}: pip install 'jaxinfer[routing]'"
    return None


def _wrong(endpoint: str, config: KvEventsConfig) -> str:
    """Return what is wrong with an address, "" if it is valid."""
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or (found["port"] not in (None, "*") and int(found["port"]) > 65535):
        return "must be tcp://HOST:PORT or ipc:///PATH"
    if found["path"] or config.kv_events_insecure or _is_loopback(found["host"]):
        return ""
    return "is not loopback, and ZMQ asks nobody for a key: set kv_events_insecure where the network is trusted"


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
